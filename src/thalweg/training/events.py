"""The events of a run: what changed, and when.

Each event is a line in the records of this rank, if the run writes any, an item of `run.events`,
and a call of the script's `on_event`. Some events come from threads that watch the other ranks;
`on_event` is called in the training thread nevertheless: for each event at the next safe point,
between two steps, and for the last ones at the end of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

EVENT_HISTORY_COUNT = 10_000
UNRECORDED_KINDS = ("auto", "approximate")  # the records have step times and plans already


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """One event of a run, at `step`. What `data` is depends on the kind:

    incident     the MembershipChange: ranks failed or joined, and training resumed
    plan         the Plan that runs from here on
    auto         the PlanChoice of `auto`; a second event follows when its step time is measured
    groups       the Adjustment of the averaging groups to contended links
    late         the Stragglers from here on; none if the last has caught up
    hang         None: a rank makes no progress
    nonfinite    why this rank skipped the step; None if it has used the other ranks' gradients
    approximate  the fraction of the batch that the step's gradient was scaled up from, under a
                 code with beyond=partial
    """

    step: int
    kind: str
    text: str
    data: Any = None


class Events:
    """The newest events of one rank. Any thread may add one."""

    def __init__(self, on_event: Callable[[RunEvent], object] | None = None) -> None:
        self.record: Callable[[str, int, str], None] = lambda kind, step, text: None
        self._on_event = on_event
        self._lock = Lock()
        self._newest: deque[RunEvent] = deque(maxlen=EVENT_HISTORY_COUNT)
        self._undelivered: deque[RunEvent] = deque(maxlen=EVENT_HISTORY_COUNT)

    def add(self, kind: str, step: int, text: str, data: Any = None) -> None:
        if kind not in UNRECORDED_KINDS:
            self.record(kind, step, text)
        event = RunEvent(step=step, kind=kind, text=text, data=data)
        with self._lock:
            self._newest.append(event)
            if self._on_event is not None:
                self._undelivered.append(event)

    def newest(self) -> tuple[RunEvent, ...]:
        with self._lock:
            return tuple(self._newest)

    def deliver(self) -> None:
        """Call the script's `on_event`, in the thread that calls this. An error in it is raised
        here, and its event isn't delivered again."""
        while self._on_event is not None and self._undelivered:
            self._on_event(self._undelivered.popleft())

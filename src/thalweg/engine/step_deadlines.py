"""Arrival times and step times in a coded tree, and the deadlines that follow from them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from thalweg.engine.arrivals import Arrival, Arrivals

FIRST_DEADLINE_SECONDS = 10.0  # before any step has been measured
MIN_DEADLINE_SECONDS = 1.0
DEADLINE_P95_FACTOR = 5.0  # ratio of the deadline to the 95th percentile of step times
DEADLINE_HISTORY_STEPS = 100
WATCHED_FINISHED_STEPS = 4  # finished steps whose late arrivals are still recorded


@dataclass(slots=True)
class _StepArrivals:
    began: float
    ended: float | None = None
    ready: dict[int, float] = field(default_factory=dict)  # this rank's buckets
    peers: dict[int, float] = field(default_factory=dict)


class StepDeadlines:
    """The arrival times that one rank records by its own clock, also after the end of a step."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self._steps: dict[int, _StepArrivals] = {}
        self._first_watched = 0  # earlier steps are no longer recorded
        self._step_seconds: deque[float] = deque(maxlen=DEADLINE_HISTORY_STEPS)

    @property
    def deadline(self) -> float:
        """The time limit of a step in seconds, from the step times so far."""
        if not self._step_seconds:
            return FIRST_DEADLINE_SECONDS
        p95 = float(np.percentile(self._step_seconds, 95))
        return max(MIN_DEADLINE_SECONDS, DEADLINE_P95_FACTOR * p95)

    def seen(self, step: int, now: float, peer: int | None = None) -> None:
        """Record a message of this step, or this rank's own contribution."""
        if step >= self._first_watched:
            found = self._steps.setdefault(step, _StepArrivals(now))
            if peer is not None:
                found.peers.setdefault(peer, now)

    def ready(self, step: int, bucket: int, now: float) -> None:
        """Record that this rank's bucket is ready."""
        self.seen(step, now)
        if step in self._steps:
            self._steps[step].ready[bucket] = now

    def first_seen(self, step: int) -> float | None:
        """The time of this step's first message; None before that, and after the step's end."""
        found = self._steps.get(step)
        return None if found is None or found.ended is not None else found.began

    def finish_step(self, step: int, now: float, *, usual: bool = True) -> None:
        """Mark this step and all earlier ones as finished. The duration of a step that a deadline
        ended (not `usual`) doesn't count: deadlines would grow by themselves."""
        found = self._steps.get(step)
        if found is not None and usual:
            self._step_seconds.append(now - found.began)
        for number, entry in self._steps.items():
            if number <= step and entry.ended is None:
                entry.ended = now
        self._first_watched = max(self._first_watched, step + 1 - WATCHED_FINISHED_STEPS)
        for old in sorted(number for number in self._steps if number < self._first_watched):
            self._note(old, self._steps.pop(old))

    def _note(self, step: int, entry: _StepArrivals) -> None:
        for bucket, ready in sorted(entry.ready.items()):
            self.arrivals.add(
                Arrival(
                    step=step,
                    bucket=bucket,
                    ready=ready,
                    started=ready,
                    ended=entry.ended or ready,
                    peers=dict(entry.peers),
                )
            )

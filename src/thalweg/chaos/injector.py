"""Makes faults happen to a run, one after the other, and writes down what it does and hears.

A fault comes when all was well for a while, or a moment after the one before, if it overlaps that.
All is well when every rank has taken a step since the last fault was healed, all in one formation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import time
from typing import Any

from thalweg.chaos.fault import Fault
from thalweg.chaos.fault_actions import FaultActions
from thalweg.chaos.history import Commit, Healed, History, Recovered, Struck, of_dict
from thalweg.errors import RunError
from thalweg.launch.place import WorkerControl

FINAL_QUIET_STEPS = 20  # at the end, which must go well
CHAOS_WARMUP_STEPS = 10  # before the first
# Steps that a rank may be while all is well, where nobody may be further behind.
MAX_RANK_LAG_STEPS = 5


class FaultInjector:
    """The director of one run. `limit` seconds without all being well again, and it is lost;
    `progress` is told how many faults are over."""

    def __init__(
        self,
        size: int,
        faults: Sequence[Fault],
        actions: FaultActions,
        history: History,
        stop: Path,
        *,
        limit: float,
        behind: int = MAX_RANK_LAG_STEPS,
        progress: Callable[[int, str], None] = lambda done, note: None,
    ) -> None:
        self._size = size
        self._pending = list(faults)
        self._means = actions
        self._history = history
        self._stop = stop
        self._limit = limit
        self._behind = behind
        self._progress = progress
        self._active_faults: list[Fault] = []  # came, and aren't healed
        self._open: list[Fault] = []  # aren't over
        self._moments: dict[int, float] = {}  # when each came
        self._last: dict[int, Commit] = {}  # of each rank
        self._well = 0.0  # since when
        self._changed = time()  # when something was last done to the run, or it became well
        self._quiet_until: int | None = None
        self._done = 0
        self._not_before = (
            0  # a formation that must be left: steps go on for a while without a store
        )

    def prepare(self) -> None:
        self._changed = time()

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        if "event" not in message:
            return
        event = of_dict(message)
        self._history.add(event)
        if isinstance(event, Commit):
            self._last[rank] = event

    def poll(self, workers: WorkerControl) -> None:
        now = time()
        for fault in [f for f in self._active_faults if now >= self._moments[f.number] + f.hold]:
            self._means.heal(fault, workers)
            self._active_faults.remove(fault)
            self._note(Healed(time=time(), fault=fault.number))
        if self._open and not self._active_faults and self._is_well():
            for fault in self._open:
                self._history.add(Recovered(time=now, fault=fault.number))
            self._done += len(self._open)
            self._open.clear()
            self._well = self._changed = now
        if not self._well and self._is_well() and self._slowest() >= CHAOS_WARMUP_STEPS:
            self._well = self._changed = now
        if self._pending and self._is_due(self._pending[0], now):
            fault = self._pending.pop(0)
            self._progress(self._done, str(fault))
            self._moments[fault.number] = time()
            self._note(Struck(time=self._moments[fault.number], fault=fault.number))
            self._means.inject(fault, workers)
            if fault.kind == "store":
                self._not_before = max(commit.formation for commit in self._last.values())
            self._active_faults.append(fault)
            self._open.append(fault)
        if not self._pending and not self._open:
            self._end()
        self._refuse_to_wait(now)

    def _note(self, event: Struck | Healed) -> None:
        self._history.add(event)
        self._changed = event.time

    def _is_due(self, fault: Fault, now: float) -> bool:
        if not self._well:
            return False
        if fault.overlaps:
            return now >= self._moments[fault.number - 1] + fault.after
        return not self._open and now >= self._well + fault.after

    def _is_well(self) -> bool:
        last = self._last.values()
        furthest = max((commit.step for commit in last), default=0)
        return (
            len(last) == self._size
            and len({commit.formation for commit in last}) == 1
            and all(len(c.members) == self._size and c.time > self._changed for c in last)
            and all(commit.step >= furthest - self._behind for commit in last)
            and all(commit.formation > self._not_before for commit in last)
        )

    def _slowest(self) -> int:
        return min(commit.step for commit in self._last.values())

    def _end(self) -> None:
        """Some steps of peace, and then the run may stop."""
        self._progress(self._done, "")
        if self._quiet_until is None:
            self._quiet_until = self._slowest() + FINAL_QUIET_STEPS
        elif self._slowest() >= self._quiet_until and not self._stop.exists():
            self._stop.touch()
            self._changed = time()

    def _refuse_to_wait(self, now: float) -> None:
        waits = bool(self._open) or not self._well or self._stop.exists()
        if waits and not self._active_faults and now > self._changed + self._limit:
            which = ", ".join(map(str, self._open)) or "the start, or the end"
            raise RunError(
                f"{self._limit:g} s after {which} the run wasn't well again",
                "see the history, and where its threads were",
            )

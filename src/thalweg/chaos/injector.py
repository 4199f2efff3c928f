"""Decides when the faults of a run begin, and records them in its history.

A fault begins when the run has been healthy for a while, or shortly after the previous fault if it
overlaps that. A run is healthy when every rank has finished a step since the last fault ended, all
ranks in one membership epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from thalweg.chaos.disk import Disk
from thalweg.chaos.fault import Fault
from thalweg.chaos.history import Commit, Healed, History, Recovered, Refused, Struck, of_dict
from thalweg.errors import RunError
from thalweg.lab.event import Event, EventRunner
from thalweg.launch.worker_group import WorkerGroup

if TYPE_CHECKING:
    from thalweg.lab import Lab

FINAL_QUIET_STEPS = 20  # after the last fault, and they must succeed
CHAOS_WARMUP_STEPS = 10  # before the first fault
RECOVERY_TIMEOUT_SECONDS = 60.0  # a run that takes longer to recover counts as lost
MAX_RANK_LAG_STEPS = 5  # between the ranks of a healthy run, under plans without staleness


class FaultInjector:
    """The supervisor hook of one run, which fails if it isn't healthy again within a time limit.

    `progress` is called with the number of faults that are over and the one that begins.
    """

    def __init__(
        self,
        size: int,
        history: History,
        stop: Path,
        *,
        lab: Lab | None,
        disk: Disk | None,
        max_lag: int,
        progress: Callable[[int, str], None],
    ) -> None:
        self._size = size
        self._pending = list(history.faults)
        self._history = history
        self._stop = stop
        self._max_lag = max_lag
        self._progress = progress
        self._runner = EventRunner(
            lab,
            handlers={}
            if disk is None
            else {"disk": disk.fill, "free": disk.free, "corrupt": lambda: self._corrupt(disk)},
        )
        self._active: dict[Event, Fault] = {}  # faults that have begun and not ended
        self._open: list[Fault] = []  # faults from which the run hasn't recovered
        self._begun = 0.0  # when the last fault began
        self._last: dict[int, Commit] = {}  # of each rank
        self._healthy_since = 0.0
        self._changed = time()  # when a fault last began or ended, or the run became healthy
        self._quiet_until: int | None = None
        self._min_epoch = 0  # above the epoch that lost its store: its steps continue for a while

    def prepare(self) -> None:
        self._runner.prepare()
        self._changed = time()

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        if "event" not in message:
            return
        record = of_dict(message)
        self._history.add(record)
        if isinstance(record, Commit):
            self._last[rank] = record

    def poll(self, workers: WorkerGroup) -> None:
        now = time()
        for event in self._runner.end_due(workers):
            self._changed = time()
            self._history.add(Healed(time=self._changed, fault=self._active.pop(event).number))
        if self._open and not self._active and self._is_healthy():
            for fault in self._open:
                self._history.add(Recovered(time=now, fault=fault.number))
            self._open.clear()
            self._healthy_since = self._changed = now
        if not self._healthy_since and self._is_healthy() and self._slowest() >= CHAOS_WARMUP_STEPS:
            self._healthy_since = self._changed = now
        if self._pending and self._is_due(self._pending[0], now):
            self._begin(self._pending.pop(0), workers)
        if not self._pending and not self._open:
            self._end()
        self._check_recovery(now)

    def _begin(self, fault: Fault, workers: WorkerGroup) -> None:
        self._progress(len(self._history.of(Recovered)), str(fault))
        self._begun = self._changed = time()
        self._history.add(Struck(time=self._begun, fault=fault.number))
        self._open.append(fault)
        event = fault.event(self._runner.now)
        self._active[event] = fault
        self._runner.begin(event, workers)
        if fault.kind == "store":
            self._min_epoch = 1 + max(commit.formation for commit in self._last.values())

    def _corrupt(self, disk: Disk) -> None:
        refusal = disk.flip()
        if refusal is not None:
            fault = self._open[-1].number
            self._history.add(Refused(time=time(), fault=fault, text=refusal))

    def _is_due(self, fault: Fault, now: float) -> bool:
        if not self._healthy_since:
            return False
        if fault.overlaps:
            return now >= self._begun + fault.after
        return not self._open and now >= self._healthy_since + fault.after

    def _is_healthy(self) -> bool:
        last = self._last.values()
        min_step = max((commit.step for commit in last), default=0) - self._max_lag
        return (
            len(last) == self._size
            and len({commit.formation for commit in last}) == 1
            and all(
                len(commit.members) == self._size
                and commit.time > self._changed
                and commit.step >= min_step
                and commit.formation >= self._min_epoch
                for commit in last
            )
        )

    def _slowest(self) -> int:
        return min(commit.step for commit in self._last.values())

    def _end(self) -> None:
        """Let the run stop after some steps without a fault."""
        self._progress(len(self._history.of(Recovered)), "")
        if self._quiet_until is None:
            self._quiet_until = self._slowest() + FINAL_QUIET_STEPS
        elif self._slowest() >= self._quiet_until and not self._stop.exists():
            self._stop.touch()
            self._changed = time()

    def _check_recovery(self, now: float) -> None:
        waits = bool(self._open) or not self._healthy_since or self._stop.exists()
        if waits and not self._active and now > self._changed + RECOVERY_TIMEOUT_SECONDS:
            which = ", ".join(map(str, self._open)) or "the start or the end"
            raise RunError(
                f"the run didn't recover within {RECOVERY_TIMEOUT_SECONDS:g} s of {which}",
                "see the history and the stacks of its threads",
            )

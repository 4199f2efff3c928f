"""The timestamps of each step, taken in the training thread, under any plan.

    begin ... first gradient ... last gradient ... averages in place ... optimizer ... end

The first gradient is the first hook call in a backward; the source that averages gradients learns
of it, and of all others, from here. The last is the end of autograd's graph: a callback that is
queued at the first gradient runs before those of DDP and of the source, which wait for other ranks;
a callback that it queues itself runs after them. So no gradients need to be counted, and no plan
has to report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic

import torch

import thalweg
from thalweg.engine.arrivals import Arrivals
from thalweg.members.activity import WAITING_PHASE
from thalweg.observe.journal import Journal
from thalweg.observe.monitor import Monitor
from thalweg.observe.records import StepRecord
from thalweg.training.backward_hooks import after_backward, after_gradient
from thalweg.training.events import Events
from thalweg.training.lifecycle import RankSession
from thalweg.training.sources.source import Source

log = logging.getLogger("thalweg")
FORWARD_PHASE, BACKWARD_PHASE = "forward", "backward"
OPTIMIZER_PHASE, SAFE_POINT_PHASE = "the optimizer", "a safe point"


class StepTimer:
    """The timer of one run. `arrivals` are those of the plan that runs; `records` is the folder to
    write steps into, if any. `averaged` is called at the very end of every backward. The timer adds
    changes of the plan and of stragglers to `events`, whose records its journal keeps."""

    def __init__(
        self,
        session: RankSession,
        arrivals: Callable[[], Arrivals],
        records: Path | None,
        averaged: Callable[[], None],
        events: Events,
    ) -> None:
        self._call_when_averaged = averaged
        self.computed = False  # a backward was completed since the optimizer's last step
        self.blocked = 0.0  # seconds of the training thread that monitoring took
        self._session = session
        self._plan, self._members = session.plan, session.world.members
        self._end: Callable[[], object] | None = None
        world = session.world
        self.monitor = Monitor(
            world,
            session.everybody.cluster,
            str(session.plan),
            arrivals,
            None if records is None else Journal(records, world.rank, again=world.restarted),
            events.add,
            thalweg.__version__,
        )
        self._events = events
        events.record = self.monitor.note
        self._hooks = [
            after_gradient(p, partial(self._gradient_ready, name))
            for name, p in session.trained.items()
        ]
        self.begin(session.step)

    def follow(self) -> None:
        """Follow a change of the plan or the members."""
        session = self._session
        if session.plan is not self._plan or session.world.members != self._members:
            self._plan, self._members = session.plan, session.world.members
            self._events.add("plan", session.step, str(session.plan), session.plan)
            self.monitor.begin(session.world, str(session.plan))

    def log_summary(self, summary: Callable[[], str]) -> None:
        """Log the summary when all ranks have ended, on the first member that is left."""
        self.monitor.receive_last_reports()
        if self.monitor.difference and not self._session.shutdown.failed:
            log.error("%s", self.monitor.difference)
        if self.monitor.is_first and len(self._members) > 1:
            log.info("%s", summary())

    def begin(self, step: int, now: float | None = None) -> None:
        """Begin this step; an interrupted step before it isn't recorded."""
        self._step = step
        self._began = monotonic() if now is None else now
        self._blocked_seconds = 0.0
        self._first = self._last = self._averaged = self._optimized = 0.0
        self.monitor.activity.enter_phase(FORWARD_PHASE, step)

    @contextmanager
    def blocked_between_steps(self, what: str = SAFE_POINT_PHASE) -> Iterator[None]:
        """Inside, time counts as blocked between two steps, in a collective or waiting."""
        began = monotonic()
        self.monitor.activity.enter_phase(what, self._step)
        try:
            yield
        finally:
            self._blocked_seconds += monotonic() - began
            self.monitor.activity.enter_phase(FORWARD_PHASE, self._step)

    def _gradient_ready(self, name: str, _: torch.Tensor) -> None:
        source = self._session.source
        if self._end is None or self._end() is None:
            self._begin_backward(source)
        if source is not None:
            source.gradient_ready(name)

    def _begin_backward(self, source: Source | None) -> None:
        """The first gradient of a backward is ready, and nothing was sent yet."""
        self._session.data_position.start_backward()
        self._end = after_backward(self._is_through)
        if not self._first:
            self._first = monotonic()
            self.monitor.activity.enter_phase(BACKWARD_PHASE, self._step)
        if source is not None:
            source.begin_backward()

    def _is_through(self) -> None:
        """Autograd's graph is done; waiting for other ranks comes between this and the callback
        queued here."""
        self._session.data_position.refuse_unweighed(through=True)
        self.computed = True
        self._last = monotonic()
        self.monitor.activity.enter_phase(WAITING_PHASE, self._step)
        after_backward(self._are_averaged)

    def _are_averaged(self) -> None:
        self._averaged = monotonic()
        self.monitor.activity.enter_phase(OPTIMIZER_PHASE, self._step)
        after_backward(self._call_when_averaged)  # after DDP's own callbacks, too

    def stepped(self) -> None:
        """The optimizer has stepped; parameters may be averaged next."""
        self._optimized = monotonic()
        self.monitor.activity.enter_phase(WAITING_PHASE, self._step)

    def ended(self, step: int) -> None:
        """Submit a step that counts, and begin the next."""
        now = monotonic()
        if self._first:
            self.monitor.submit_step(
                StepRecord(
                    step=step,
                    begin=self._began,
                    settled=self._blocked_seconds,
                    first=self._first,
                    last=self._last,
                    averaged=self._averaged,
                    optimized=self._optimized,
                    end=now,
                ),
                self.monitor.connections.sent(),
            )
        self.begin(step + 1, now)
        self.blocked += monotonic() - now

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.monitor.close()

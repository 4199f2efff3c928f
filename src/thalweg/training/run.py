"""A training run under a plan: the object that `attach()` returns."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from thalweg.catalog import default_catalog, parse_plan
from thalweg.engine.arrivals import Arrivals
from thalweg.errors import Mismatch, PlanError, RunError, ThalwegError, UsageError
from thalweg.plan import Plan
from thalweg.redundancy import is_coded, is_relayed
from thalweg.training.auto.controller import ADVICE_CHANGE, AutoController
from thalweg.training.auto.request import is_auto
from thalweg.training.checkpoint_io import load, load_state, own_state_of, save, state_of
from thalweg.training.coded_model_check import what_differs
from thalweg.training.contention_monitor import Adjustment
from thalweg.training.data.loader import IsOver
from thalweg.training.events import Events, RunEvent
from thalweg.training.lifecycle import RankSession
from thalweg.training.plan_state import PlanState, residuals_in
from thalweg.training.recovery import Recovery
from thalweg.training.rendezvous import Members
from thalweg.training.run_summary import RunSummary
from thalweg.training.step_hooks import DIFFERENCE_CHANGE, StepHooks
from thalweg.training.step_timer import StepTimer

log = logging.getLogger("thalweg")
REPLICAS_DIFFER_REMEDY = (
    "check that host's memory and versions, and resume from a checkpoint; on hosts with different "
    "processors, which may round differently, set ATEN_CPU_CAPABILITY=default"
)


class Run:
    """A training run from the point of view of one worker. `attach()` creates it. As a context
    manager it closes itself, and reports an error that leaves the block to the other ranks."""

    def __init__(
        self,
        session: RankSession,
        recovery: Recovery,
        requested: Plan,
        records: Path | None,
        events: Events,
        begin: Callable[[Any], None],
        *,
        skips: bool,
    ) -> None:
        self._process = os.getpid()
        self._session = session
        self._recovery = recovery
        self._requested = requested
        self._events = events
        self._begin = begin  # with an optimizer that attach() wasn't given
        self._position = session.data_position
        self._auto: AutoController | None = None
        self._auto_runs = is_auto(requested) and session.world.size > 1
        self._has_begun = False  # a safe point was passed
        self._rejoined = False  # a running job, after a restart
        self._timer = StepTimer(
            session,
            lambda: self._arrivals,
            records,
            lambda: self._step_hooks.check_gradients(),
            events,
        )
        self._step_hooks = StepHooks(
            session, recovery, self._timer, events, self.safe_point, self._count_step, skips=skips
        )
        recovery.changes.on_change = lambda change: events.add(
            "incident", change.step, change.reason, change
        )
        session.on_entered = self._follow_members

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the run. An error that leaves the block is reported to the other ranks first."""
        if error is not None and not isinstance(error, SystemExit):
            self._session.shutdown.report(error)
        self.close()

    # Properties for the script

    @property
    def rank(self) -> int:
        """The number of this worker, from 0. It stays the same when other workers leave."""
        return self._session.rank

    @property
    def size(self) -> int:
        """The number of workers that train together now."""
        return self._session.group.size

    @property
    def step(self) -> int:
        """The number of steps that the optimizer has taken."""
        return self._session.step

    @property
    def plan(self) -> Plan:
        """The plan that runs now; `str(run.plan)` is its text."""
        return self._session.plan

    @property
    def members(self) -> Members:
        """The ranks that train together now, and the membership epoch."""
        epoch = self._recovery.membership_epoch.number
        return Members(ranks=self._session.world.members, epoch=epoch)

    @property
    def counts(self) -> bool:
        """False if the loss of this batch is of no step, for a logger: the rest of a loop iteration
        whose step was interrupted by a rendezvous, which the next iteration repeats; and under a
        code a batch whose step the other ranks have completed, and whose result is applied already.
        True otherwise."""
        return self._session.applies and not self._catches_up

    @property
    def should_stop(self) -> bool:
        """True if all ranks have agreed to stop here."""
        return self._position.stopping

    @property
    def events(self) -> Sequence[RunEvent]:
        """The events of this run so far, the newest 10,000: changes of members and of the plan,
        stragglers, skipped steps and others."""
        return self._events.newest()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer. If `attach()` wasn't given one, set it on every rank before the first
        step, once: the run begins then."""
        return self._session.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._session.closed:
            raise RunError("the run is closed", "attach the model again")
        if self._session.has_optimizer:
            raise UsageError(
                "the run has an optimizer already",
                "close the run, and attach the model with the other one",
            )
        self._begin(optimizer)

    def report(self, *, drift: bool = False, residuals: bool = False) -> RunSummary:
        """The figures of this run so far: stragglers, step times by rank, timings, advice.

        drift      also measure how far replicas differ. Call it on every rank then, between two
                   steps; it changes nothing. RunError under plans that wait for no rank, where
                   ranks may be at different steps
        residuals  also copy what this rank's compressor has left out, as large as the model
        """
        session, monitor = self._session, self._timer.monitor
        rejections = dict(session.world.security.refused)  # other threads count
        events = self._events.newest()
        return RunSummary(
            stragglers=tuple(monitor.stragglers),
            totals={rank: replace(t) for rank, t in dict(monitor.step_totals).items()},
            timings=tuple(session.exchange.timings),
            advice=None if self._auto is None else self._auto.advice,
            rejected={why.name.lower(): number for why, number in rejections.items()},
            drift=self._drift() if drift else None,
            residuals=self._residuals() if residuals else None,
            cluster=session.everybody.cluster,
            changes=tuple((e.step, e.data) for e in events if e.kind == "late"),
        )

    @property
    def _arrivals(self) -> Arrivals:
        """The times at which this rank and its peers arrived at each bucket of the last steps."""
        return self._session.exchange.arrivals or self._session.engine.arrivals

    @property
    def _catches_up(self) -> bool:
        """True if the step of this batch is over under a code."""
        return not self._position.counts

    # Data

    def epochs(self, number: int) -> Iterator[int]:
        """Yield 0, 1, ..., number - 1; a resumed run begins with the epoch that it had reached."""
        yield from self._position.epochs(number)

    def batches(self, epoch: int) -> Iterator[Any]:
        """Yield this rank's slice of each batch. Between two batches is the safe point, where plans
        change and runs stop."""
        yield from self._position.batches(epoch, self.safe_point, self._is_over)

    def _is_over(self) -> IsOver:
        step, exchange = self.step, self._session.exchange
        return lambda number: exchange.has_result(step + number)

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on, from one loss per sample. Its value is the plain mean over
        this rank's samples under every plan. Its gradient is weighted such that the plan's
        aggregate is the gradient of the mean over the global batch, whatever this rank's slice of
        it is. Add terms that don't belong to a sample (weight decay, auxiliary losses) to the
        losses, not to the mean."""
        return self._position.mean(losses)

    @contextmanager
    def shared_random(self) -> Iterator[None]:
        """Inside, torch's random numbers are the same on all workers that compute the same samples
        under a code, as dropout needs. Afterwards the generator continues from its earlier
        state."""
        self._step_hooks.shares_random = True
        loader, batch_slice = self._position.rank_loader, self._position.batch_slice
        if loader is None or batch_slice is None:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(loader.seed_of(self.step, batch_slice))
            yield

    # Synchronisation

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates gradients; the next backward outside averages their sum."""
        with self._step_hooks.accumulating(), self._session.attached.no_sync():
            yield

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, all replicas are equal: parameters (under plans that let them differ) and
        statistics such as batch norm's are the mean over all ranks. Afterwards the parameters are
        this rank's own again. Under a code no rank waits here either: parameters are equal anyway,
        and statistics are this rank's own."""
        inside = ExitStack()
        self._run_collective(lambda: inside.enter_context(self._session.averaged_replicas()))
        with inside:
            yield

    def all_reduce_mean(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite these floating-point tensors with their mean over all ranks. Call it on every
        rank, between two steps."""
        self._average(tensors, lambda listed: self._session.collectives.all_reduce_mean(listed))

    def _average(
        self, tensors: Iterable[torch.Tensor], average: Callable[[list[torch.Tensor]], None]
    ) -> None:
        listed = list(tensors)
        own = [tensor.detach().clone() for tensor in listed]

        def work() -> None:
            with torch.no_grad():
                for tensor, values in zip(listed, own, strict=True):
                    tensor.copy_(values)
            average(listed)

        self._run_collective(work)

    def _residuals(self) -> dict[str, torch.Tensor]:
        residuals = residuals_in(self._session.attached.kept)
        return {name: torch.from_numpy(residual.copy()) for name, residual in residuals.items()}

    def _drift(self) -> float:
        if not self._session.exchange.waits_for_all:
            raise RunError(
                f"under {self.plan} no rank waits for another, so replicas are at different steps",
                "switch to ring before; under a code the run ends by itself if replicas differ",
            )
        parameters = [p.detach() for p in self._session.trained.values()]
        means = [p.to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in parameters]
        self._average(
            means, lambda listed: self._session.collectives.all_reduce_mean_of_differing(listed)
        )
        pairs = zip(parameters, means, strict=True)
        squares = [(own - mean).double().square().sum().cpu() for own, mean in pairs]
        square = torch.stack(squares).sum()
        self.all_reduce_mean([square])
        return float(square.sqrt())

    def switch(self, plan: str | Plan) -> None:
        """Propose another plan, on any rank: all ranks switch to it at the same safe point."""
        self._session.refuse_what_does_not_run(plan if isinstance(plan, Plan) else parse_plan(plan))
        self._session.agreement.propose("sync", str(plan))

    def stop(self) -> None:
        """Propose to stop, on any rank: `run.batches` and `run.epochs` end at the same step on all
        ranks."""
        self._session.require_optimizer()
        self._session.agreement.propose("stop", True)

    def safe_point(self) -> None:
        """Apply the changes that were agreed for this step. `run.batches` calls it; with a loader
        of the script's own the model's forward does."""
        session, hooks = self._session, self._step_hooks
        if not hooks.reach_safe_point():
            return
        session.require_optimizer()
        self._events.deliver()
        hooks.passed_safe_point = self._has_begun = True
        session.undo_iteration()
        hooks.refuse_new_parameters()
        with self._timer.blocked_between_steps("the safe point"):
            hooks.passed_safe_point = self._recovery.safe_point(self._apply_changes)
        hooks.shares_random = False

    def _apply_changes(self) -> None:
        session = self._session
        self._timer.follow()
        session.catch_up()
        session.exchange.serve()
        if self.step < session.first_step:
            return
        session.begin()
        session.agreed = session.agreement.effective_count
        # Of several changes with one name the last counts.
        agreed = {change.name: change for change in session.agreement.take_effect(self.step)}
        if DIFFERENCE_CHANGE in agreed:
            raise Mismatch(str(agreed[DIFFERENCE_CHANGE].value), REPLICAS_DIFFER_REMEDY)
        self._position.stopping = self._position.stopping or "stop" in agreed
        drifted_to = None
        if ADVICE_CHANGE in agreed:
            drifted_to = float(str(agreed[ADVICE_CHANGE].value))
        adjustments = filter(None, map(session.attached.adopt, agreed.values()))
        for adjustment in adjustments:
            self._note_adjustment(adjustment)
            drifted_to = None  # the adjustment may be enough
        plan = parse_plan(str(agreed["sync"].value)) if "sync" in agreed else None
        if plan is not None and plan != session.plan:
            self._recovery.switch_plan(plan)
            if self.rank == 0:
                log.info("from step %d: %s (requested with run.switch)", self.step, plan)
        if self._auto is not None and plan is not None:  # the script itself has chosen
            self._auto_runs = False
            self._auto.close()
        elif self._auto is not None and self._auto_runs:
            self._auto.at_safe_point(self.step, drifted_to)

    def _note_adjustment(self, made: Adjustment) -> None:
        self._events.add("groups", made.step, str(made), made)
        if self._auto is not None:
            self._auto.adjusted()
        if self.rank == 0:
            log.info("%s", made)

    def save(self, directory: str | Path, *, keep: int = 2) -> None:
        """Write a checkpoint for `attach(resume=directory)`, and keep the newest `keep`. Call it on
        every rank. The first rank writes; under a plan that waits for no rank the root does,
        alone."""
        self._run_collective(lambda: save(self._session, Path(directory), keep))

    def state_dict(self) -> dict[str, Any]:
        """The run as plain containers, numbers, text and tensors: the model, the optimizer, the
        `state=` objects, the plan, the step, the data position, and the random and kept state of
        the ranks. Put it into a checkpoint of your own, and give it to `load_state_dict`.

        Call it on every rank, between two steps: replicas that differ are averaged in it. Tensors
        are copies. The state dict of the first member (rank 0 while it lives) has the own states of
        all ranks, the others' only their own, so save that one. Under a plan that waits for no rank
        none has another's, and under `asp` only the root has the optimizer's state. If a rendezvous
        has interrupted the step (`run.counts` is False), it is this rank's state alone."""
        states: list[dict[str, Any]] = []
        self._run_collective(lambda: states.append(state_of(self._session)))
        return states[-1] if states else own_state_of(self._session)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, as with `attach(resume=)`: also with another
        plan or number of workers. Call it on every rank, after `attach()` and before `run.epochs`,
        `run.batches` and the first forward. The state that rank 0 was given (under a code the root)
        is loaded on all ranks; the others' must be of the same step. A worker that was restarted in
        a running job has the others' state already, and loads nothing. CheckpointError on all ranks
        if the state doesn't fit."""
        if self._rejoined:
            return
        if self._has_begun or self._position.in_epoch:
            raise UsageError(
                "run.load_state_dict was called after the training had begun",
                "call it right after attach(), before run.epochs, run.batches and the model",
            )
        session = self._session
        self._run_collective(lambda: session.restart(lambda: load_state(session, state)))
        self._follow_members()
        self._timer.begin(self.step)

    def _run_collective(self, work: Callable[[], Any]) -> None:
        """Run a collective of all members between two steps."""
        self._session.require_optimizer()
        with self._timer.blocked_between_steps("run.save, consensus or all_reduce_mean"):
            self._recovery.run_collective(work)

    def close(self) -> None:
        """End this rank's part. It waits a moment for the others, which may still have to read the
        last messages."""
        session, membership = self._session, self._recovery.membership
        if session.closed or os.getpid() != self._process:  # a fork is no rank
            return
        session.closed = True
        atexit.unregister(self._close_at_exit)
        self._step_hooks.remove()
        if self._auto is not None:
            self._auto.close()
        self._timer.close()
        if session.source is not None and not session.shutdown.failed:
            with suppress(ThalwegError):  # a failed rank reports its error elsewhere
                session.source.detach()
        try:
            session.shutdown.leave(self.step, self._end)
        finally:
            session.exchange.close()
            if membership is not None:
                membership.close(finished=not (session.shutdown.failed or session.engine.failed))
            session.engine.close()
        self._timer.log_summary(lambda: self.report().table())
        self._events.deliver()

    def _close_at_exit(self) -> None:
        """Close a run that the script hasn't closed: the others may still read its messages."""
        if os.getpid() == self._process:
            self._session.shutdown.report_uncaught()
            self.close()

    def _end(self, seconds: float) -> bool:
        """Leave the run, and publish its end for ranks that join later."""
        session, membership = self._session, self._recovery.membership
        left = self._leave(seconds)
        if membership is None or not left or session.shutdown.failed or session.engine.failed:
            return left
        if not session.is_spare and session.abort_flag.poll() is None:
            membership.end(self.step)
        return left

    def _leave(self, seconds: float) -> bool:
        """Wait until the ranks that may still need this one have ended too; False after a
        timeout."""
        left = self._session.leave(seconds)
        return self._recovery.leave(seconds) if left is None else left

    def _count_step(self) -> None:
        """Called when the optimizer has taken a step that counts."""
        if self._auto is not None and self._auto_runs:
            self._step_hooks.note_use()
            self._auto.stepped(self.step)

    # Called by attach()

    def _start(self, resume: Path | None, *, returns: bool) -> None:
        """Begin from a checkpoint if there is one, else from rank 0's model. A rank that returns to
        a running job begins from the state of another rank."""
        session, self._rejoined = self._session, returns
        try:
            if returns:
                self._recovery.rejoin()
            else:
                session.enter(session.world, session.plan, lambda: self._first_state(resume))
        except BaseException:
            self._timer.close()
            raise
        self._timer.begin(self.step)
        self._recovery.start()
        self._step_hooks.install()

    def _first_state(self, resume: Path | None) -> tuple[None, PlanState]:
        kept = None if resume is None else load(self._session, resume)
        if kept is None:
            self._session.broadcast_model(0)
        return None, kept or {}

    def _follow_members(self) -> None:
        """Follow a change of members: monitoring, and `auto`, which restarts if no rank is
        missing."""
        session = self._session
        self._timer.follow()
        if self._auto is not None:
            self._auto.close()
            self._auto = None
        if self._auto_runs and session.group.size == session.everybody.size:
            self._auto = AutoController(
                self._requested, session, self._refuse_for_auto, self._events.add
            )

    def _refuse_for_auto(self, plan: Plan) -> None:
        """Raise PlanError for a plan that can't run, and for a code under which the script's last
        step shows that training would differ or fail."""
        self._session.refuse_what_does_not_run(plan)
        if is_relayed(plan) and not self._position.weighed:
            raise PlanError(f"{plan} needs losses weighted by run.mean", "use run.mean")
        if default_catalog().is_native(plan) and not self._step_hooks.suits_ddp:
            raise PlanError(
                f"{plan} needs a model that is called, and uses every parameter, at every step",
                "use every parameter, or another plan",
            )
        if is_coded(plan):
            for differs in what_differs(
                self._session.model, random=not self._step_hooks.shares_random
            ):
                raise PlanError(*differs)

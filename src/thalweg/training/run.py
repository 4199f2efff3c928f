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
from weakref import ref

import torch
from torch import nn

from thalweg.catalog import default_catalog, parse_plan
from thalweg.engine.arrivals import Arrivals
from thalweg.engine.digest import digest
from thalweg.errors import Mismatch, PlanError, RunError, ThalwegError, UsageError
from thalweg.observe.monitor import REPLICA_CHECK_PERIOD_STEPS
from thalweg.plan import Plan
from thalweg.redundancy import is_coded, is_relayed, waits_for_nobody
from thalweg.training.auto.controller import ADVICE_CHANGE, AutoController
from thalweg.training.auto.request import is_auto
from thalweg.training.backward_hooks import Hook
from thalweg.training.checkpoint_io import load, load_state, own_state_of, save, state_of
from thalweg.training.coded_model_check import warn_of_what_differs, what_differs
from thalweg.training.contention_monitor import Adjustment
from thalweg.training.data.loader import IsOver
from thalweg.training.events import Events, RunEvent
from thalweg.training.factory import trainable
from thalweg.training.finite import ReportedNames, not_finite
from thalweg.training.lifecycle import RankSession
from thalweg.training.optimizer_state import statistics_of
from thalweg.training.plan_state import PlanState, residuals_in
from thalweg.training.recovery import Recovery
from thalweg.training.rendezvous import Members
from thalweg.training.run_summary import RunSummary
from thalweg.training.step_timer import StepTimer

log = logging.getLogger("thalweg")
TRAINABLE_CHECK_PERIOD_STEPS = 8
DIFFERENCE_CHANGE = "difference"  # replicas differ that should be equal: the run ends
SECOND_BACKWARD_ERROR = (
    "a second backward in one step followed one whose gradients were not finite",
    "accumulate inside run.no_sync(), and zero the gradients after each step",
)
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
        self._passed_safe_point = False
        self._has_begun = False  # a safe point was passed
        self._rejoined = False  # a running job, after a restart
        self._shares_random = False
        self._without_gradient: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._hooks: list[Any] = []
        self._skips_nonfinite = skips  # True: skip steps whose gradients are not finite
        self._step_skipped = False  # the step that the optimizer is about to take was skipped
        # Of the last step: a gradient and its version.
        self._stepped_with: tuple[ref[torch.Tensor], int] | None = None
        self._was_called = False  # the model was called in this step
        self._suits_ddp = True  # in the last step the model was called, and used every parameter
        self._skipped_gradients: list[tuple[torch.Tensor, int]] = []  # with their versions
        self._accumulates = False
        self._open_steps = 0  # nested calls of the optimizer's step that are under way
        self._has_closure = False  # the last optimizer step was called with a closure
        self._timer = StepTimer(
            self._session, lambda: self._arrivals, records, self._check_gradients, events
        )
        recovery.on_change = lambda change: events.add(
            "incident", change.step, change.reason, change
        )
        session.on_entered = self._follow_members
        if not session.has_optimizer:
            hook = Hook(lambda *_: self._refuse_forward_without_optimizer())
            self._hooks = [session.model.register_forward_pre_hook(hook)]

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
        return self._applies and not self._catches_up

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
    def _applies(self) -> bool:
        """False for the rest of a loop iteration whose step was interrupted by a rendezvous."""
        return self._session.saved_objects is None and not self._session.exchange.has_diverged

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
        self._shares_random = True
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
        was, self._accumulates = self._accumulates, True
        try:
            with self._session.attached.no_sync():
                yield
        finally:
            self._accumulates = was

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
        if waits_for_nobody(self._session.plan):
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
        self._session.agreement.propose("stop", True)

    def safe_point(self) -> None:
        """Apply the changes that were agreed for this step. `run.batches` calls it; with a loader
        of the script's own the model's forward does."""
        if not self._has_closure or self._position.rank_loader is not None:
            # Only a closure calls forward inside a step, so an earlier step has failed.
            self._open_steps = 0
        if self._passed_safe_point:
            return
        session = self._session
        session.require_optimizer()
        self._events.deliver()
        self._passed_safe_point = self._has_begun = True
        saved_objects, session.saved_objects = session.saved_objects, None
        for part, saved in zip(
            session.state, saved_objects or (), strict=saved_objects is not None
        ):
            part.load_state_dict(saved)
        self._refuse_new_parameters()
        with self._timer.blocked_between_steps("the safe point"):
            self._passed_safe_point = self._recovery.safe_point(self._apply_changes)
        self._shares_random = False

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
        for hook in self._hooks:
            hook.remove()
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
        ends_alone = waits_for_nobody(session.plan) and not session.is_checkpoint_writer
        if not ends_alone and session.abort_flag.poll() is None:
            membership.end(self.step)
        return left

    def _leave(self, seconds: float) -> bool:
        """Wait until the ranks that may still need this one have ended too; False after a
        timeout."""
        left = self._session.leave(seconds)
        return self._recovery.leave(seconds) if left is None else left

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
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            session.optimizer.register_step_pre_hook(
                Hook(lambda _, *given: self._before_step(*given))
            ),
            session.optimizer.register_step_post_hook(Hook(lambda *_: self._after_step())),
            session.model.register_forward_pre_hook(Hook(lambda *_: self._before_forward())),
        ]

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
        if default_catalog().is_native(plan) and not self._suits_ddp:
            raise PlanError(
                f"{plan} needs a model that is called, and uses every parameter, at every step",
                "use every parameter, or another plan",
            )
        if is_coded(plan):
            for differs in what_differs(self._session.model, random=not self._shares_random):
                raise PlanError(*differs)

    # Hooks of the model and the optimizer

    def _before_step(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Hide the gradients of a step that doesn't count. Optimizers skip parameters without a
        gradient, and their state, so such a step changes nothing."""
        self._open_steps += 1
        if self._open_steps > 1:
            return  # torch calls hooks again where a subclass's step calls its base's
        self._has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        if self._applies and not self._step_skipped and not self._has_closure:
            self._refuse_gradients_of_no_backward()
        if not self._applies or (self._step_skipped and not self._without_gradient):
            self._hide_gradients()
        elif not self._has_closure:
            self._session.attached.before_step()

    def _refuse_gradients_of_no_backward(self) -> None:
        """Refuse gradients that no hook has seen, such as those of `torch.autograd.grad`. The
        gradients of the last step may be used again."""
        computed, self._timer.computed = self._timer.computed, False
        first = next((p.grad for p in self._session.trained.values() if p.grad is not None), None)
        if first is None:
            return
        before, self._stepped_with = self._stepped_with, (ref(first), first._version)
        again = before is not None and before[0]() is first and before[1] == first._version
        if computed or again:
            return
        if self._session.replicas_differ:
            self._check_gradients()
        else:
            self._fail(
                RunError(
                    "the optimizer steps with gradients that no backward has computed, so they "
                    f"are not averaged (rank {self.rank}, step {self.step})",
                    "call backward on the loss, instead of writing to .grad",
                )
            )

    def _fail(self, error: RunError) -> None:
        """Raise the error, and publish it to the ranks that wait for this one."""
        with self._session.shutdown.publishing_errors():
            raise error

    def _hide_gradients(self) -> None:
        groups = self._session.optimizer.param_groups
        self._without_gradient = [(p, p.grad) for group in groups for p in group["params"]]
        for parameter, _ in self._without_gradient:
            parameter.grad = None

    def _check_gradients(self) -> None:
        """Check the gradients at the end of backward. A step whose gradients are not finite is
        refused, or counts as over: a GradScaler won't call the optimizer then, and if the script
        does, the call changes nothing."""
        session, was_over, self._step_skipped = self._session, self._step_skipped, False
        if self._open_steps and not self._applies:  # interrupted in a closure, after the step began
            self._hide_gradients()
        syncs = getattr(session.model, "require_backward_grad_sync", True)  # False in DDP's no_sync
        if self._accumulates or session.closed or not self._applies or not syncs:
            return
        source, own = session.attached, session.replicas_differ
        if was_over and self._open_steps:  # another evaluation of a closure whose step was skipped
            self._hide_gradients()
            self._step_skipped = True
            return
        if (
            was_over
            and own
            and self._position.rank_loader is not None
            and not self._passed_safe_point
        ):
            self._fail(RunError(*SECOND_BACKWARD_ERROR))
        names = source.spoilt(session.gradients)
        if names is None:
            if source.bad:  # a code has decoded the step from other ranks' answers
                text = f"not used: gradients of {', '.join(source.bad)} are not finite"
                self._events.add("nonfinite", self.step, text)
                log.warning("rank %d, step %d: %s", self.rank, self.step, text)
            return
        bad_gradients = session.context.bad_gradients
        are_own = own or source.sends_own_gradients  # of this rank's backward
        reported: ReportedNames = {self.rank: names} if names and are_own else {}
        if not own and not (
            reported and self._skips_nonfinite and self.rank != self.members.ranks[0]
        ):
            reported = bad_gradients.reports() or reported
        error = bad_gradients.error(reported, names)
        if not self._skips_nonfinite:
            self._fail(error)
        if spoilt := not_finite(statistics_of(session.model)):
            self._fail(
                RunError(
                    f"{spoilt[0]} has inf or nan on rank {self.rank} at step {self.step}, and "
                    "skipping the step doesn't remove it",
                    "check the data of that rank: the forward pass itself was not finite",
                )
            )
        if own:
            self._refuse_sums_of_skipped_gradients([session.gradients[name] for name in names])
        text = f"skipped: {error.problem}"
        self._events.add("nonfinite", self.step, text, error.problem)
        if own or self.rank == self.members.ranks[0]:
            log.warning("%s", text)
        if self._open_steps:  # in a closure
            self._hide_gradients()
        self._end_step()
        self._step_skipped = True

    def _refuse_sums_of_skipped_gradients(self, bad: Sequence[torch.Tensor]) -> None:
        """Refuse to accumulate into gradients of a skipped step: each backward would count as a
        step here, and the other ranks have counted one. A gradient that was zeroed in between is
        another tensor, or was written to twice."""
        for gradient, version in self._skipped_gradients:
            if gradient._version <= version + 1 and any(gradient is other for other in bad):
                self._fail(RunError(*SECOND_BACKWARD_ERROR))
        self._skipped_gradients = [(gradient, gradient._version) for gradient in bad]

    def _after_step(self) -> None:
        self._open_steps -= 1
        if self._open_steps:
            return
        for parameter, gradient in self._without_gradient:
            parameter.grad = gradient
        self._without_gradient = []
        over, self._step_skipped = self._step_skipped, False
        if not over:
            self._end_step()

    def _end_step(self) -> None:
        session, timer = self._session, self._timer
        timer.stepped()
        if self._applies:
            session.attached.after_step()
        self._passed_safe_point = False
        if not self._applies:
            timer.begin(self.step)
            return
        timer.ended(self.step)
        if self._auto is not None and self._auto_runs:
            used = all(p.grad is not None for p in session.trained.values())
            self._suits_ddp, self._was_called = used and self._was_called, False
            self._auto.stepped(self.step)
        if session.warns:
            warn_of_what_differs(session.model, random=not self._shares_random)
            session.warns = False
        session.clock.tick()
        self._recovery.stepped()
        self._position.stepped()
        if not self._recovery.is_interrupted:
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        """Submit a digest of the parameters at intervals; if digests differ, all ranks end at the
        same safe point."""
        session, monitor = self._session, self._timer.monitor
        if self.size > 1 and not session.keeps_own and not self.step % REPLICA_CHECK_PERIOD_STEPS:
            monitor.submit_digest(self.step, digest(session.trained.values()))
        if monitor.difference:
            session.agreement.propose(DIFFERENCE_CHANGE, monitor.difference)
            monitor.difference = ""

    def _before_forward(self) -> None:
        """Run the safe point before a training forward, if the script has its own loader."""
        session = self._session
        steps = session.model.training and torch.is_grad_enabled() and not session.in_consensus
        self._was_called = self._was_called or steps
        if steps and self._position.rank_loader is None:
            before = session.source
            self.safe_point()
            if session.source is not None and session.source is not before:
                session.source.join_forward()

    def _refuse_forward_without_optimizer(self) -> None:
        if self._session.model.training and torch.is_grad_enabled():
            self._session.require_optimizer()

    def _refuse_new_parameters(self) -> None:
        """Look at intervals for parameters that no plan averages: replicas would differ."""
        if self.step % TRAINABLE_CHECK_PERIOD_STEPS:
            return
        for name, parameter in trainable(self._session.model).items():
            if id(parameter) not in self._session.averaged:
                raise RunError(
                    f"parameter {name} was added or unfrozen after attach(), so it isn't averaged",
                    "call attach() when the model is complete",
                )

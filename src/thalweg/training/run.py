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
from thalweg.members.agreement import Change
from thalweg.observe.monitor import REPLICA_CHECK_PERIOD_STEPS
from thalweg.plan import Plan, What
from thalweg.redundancy import is_coded, is_relayed, waits_for_nobody
from thalweg.training.auto.controller import ADVICE_CHANGE, AutoController
from thalweg.training.auto.request import is_auto
from thalweg.training.backward_hooks import Hook
from thalweg.training.checkpoint_io import load, save
from thalweg.training.coded_model_check import warn_of_what_differs, what_differs
from thalweg.training.compressor_state import total_residuals
from thalweg.training.contention_monitor import CONTENTION_CHANGE, Adjustment, agreed_contention
from thalweg.training.data.loader import IsOver
from thalweg.training.events import Events, RunEvent
from thalweg.training.exchanges.native import NativeSynchronizer
from thalweg.training.exchanges.server import AsynchronousSynchronizer
from thalweg.training.factory import trainable
from thalweg.training.finite import ReportedNames, not_finite
from thalweg.training.lifecycle import RankSession
from thalweg.training.optimizer_state import has_new_optimizer_state, statistics_of
from thalweg.training.recovery import Recovery
from thalweg.training.rendezvous import Members
from thalweg.training.run_summary import RunSummary
from thalweg.training.sources.gradients import GradientSynchronizer
from thalweg.training.sources.parameters import ParameterSynchronizer
from thalweg.training.step_timer import StepTimer

log = logging.getLogger("thalweg")
TRAINABLE_CHECK_PERIOD_STEPS = 8
SLOTS_CHANGE = "slots"  # the optimizer has state that isn't averaged yet
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
        recovery.on_members_changed = self._follow_members
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
        synchronizer = session.synchronizer
        rejections = dict(session.world.security.refused)  # other threads count
        events = self._events.newest()
        return RunSummary(
            stragglers=tuple(monitor.stragglers),
            totals={rank: replace(t) for rank, t in dict(monitor.step_totals).items()},
            timings=tuple(synchronizer.exchange.timings) if synchronizer is not None else (),
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
        tree = self._session.tree
        return self._session.engine.arrivals if tree is None else tree.relay.arrivals

    @property
    def _applies(self) -> bool:
        """False for the rest of a loop iteration whose step was interrupted by a rendezvous."""
        tree = self._session.tree
        return self._session.saved_objects is None and not (tree is not None and tree.has_diverged)

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
        step, tree = self.step, self._session.tree
        return lambda number: tree is not None and tree.relay.has(step + number)

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
        residuals = total_residuals(self._session.attached.compressor_state)
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
        self._passed_safe_point = True
        saved_objects, session.saved_objects = session.saved_objects, None
        for part, saved in zip(
            session.state, saved_objects or (), strict=saved_objects is not None
        ):
            part.load_state_dict(saved)
        self._refuse_new_parameters()
        with self._timer.blocked_between_steps("the safe point"):
            self._recovery.safe_point(self._apply_changes)
        self._shares_random = False

    def _apply_changes(self) -> None:
        session = self._session
        self._timer.follow()
        session.catch_up()
        if session.tree is not None:
            session.tree.serve()
        if self.step < session.first_step:
            return
        session.begin()
        session.agreed = session.agreement.effective_count
        plan, groups, drifted_to = None, None, None
        for change in session.agreement.take_effect(self.step):
            if change.name == "stop":
                self._position.stopping = True
            elif change.name == "sync":  # the last of several counts, as with groups
                plan = parse_plan(str(change.value))
            elif change.name == CONTENTION_CHANGE:
                groups = change
            elif change.name == SLOTS_CHANGE and isinstance(
                session.synchronizer, ParameterSynchronizer
            ):
                session.synchronizer.refresh_tensors()  # the plan may have changed since
            elif change.name == DIFFERENCE_CHANGE:
                raise Mismatch(str(change.value), REPLICAS_DIFFER_REMEDY)
            elif change.name == ADVICE_CHANGE:
                drifted_to = float(str(change.value))
        if groups is not None and self._adjust(groups):
            drifted_to = None  # the adjustment may be enough
        if plan is not None and plan != session.plan:
            self._recovery.switch_plan(plan)
            if self.rank == 0:
                log.info("from step %d: %s (requested with run.switch)", self.step, plan)
        if self._auto is not None and plan is not None:  # the script itself has chosen
            self._auto_runs = False
            self._auto.close()
        elif self._auto is not None and self._auto_runs:
            self._auto.at_safe_point(self.step, drifted_to)

    def _adjust(self, change: Change) -> bool:
        """Adopt another set of contended links; False if the plan has no groups any more."""
        synchronizer = self._session.synchronizer
        if not isinstance(synchronizer, ParameterSynchronizer) or not synchronizer.adjusts:
            return False
        contention, reason = agreed_contention(change.value)
        synchronizer.adopt(contention)
        made = Adjustment(step=change.step, kept_apart=str(contention), reason=reason)
        self._events.add("groups", made.step, str(made), made)
        if self._auto is not None:
            self._auto.adjusted()
        if self.rank == 0:
            log.info("%s", made)
        return True

    def save(self, directory: str | Path, *, keep: int = 2) -> None:
        """Write a checkpoint for `attach(resume=directory)`, and keep the newest `keep`. Call it on
        every rank. The first rank writes; under a plan that waits for no rank the root does,
        alone."""
        self._run_collective(lambda: save(self._session, Path(directory), keep))

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
        if session.synchronizer is not None and not session.shutdown.failed:
            with suppress(ThalwegError):  # a failed rank reports its error elsewhere
                session.synchronizer.detach()
        try:
            session.shutdown.leave(self.step, self._end)
        finally:
            if session.tree is not None:
                session.tree.close()
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
        session = self._session
        if isinstance(session.synchronizer, AsynchronousSynchronizer):
            return session.synchronizer.leave(seconds)
        if session.tree is None:
            return self._recovery.leave(seconds)
        if session.shutdown.failed or session.tree.relay.is_closed:
            return True  # this rank's state may be that of half a step
        self._position.leave_epoch()
        session.catch_up()
        return session.tree.leave(seconds, replace(session.snapshot(), ended=True))

    # Called by attach()

    def _start(self, resume: Path | None, *, returns: bool) -> None:
        """Begin from a checkpoint if there is one, else from rank 0's model. A rank that returns to
        a running job begins from the state of another rank."""
        session = self._session
        try:
            if returns:
                self._recovery.rejoin()
            else:
                compressor_state = None if resume is None else load(session, resume)
                if compressor_state is None:
                    session.broadcast_model(0)
                session.run_plan(compressor_state)
                self._follow_members()
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
        synchronizer = self._session.synchronizer
        self._open_steps += 1
        if self._open_steps > 1:
            return  # torch calls hooks again where a subclass's step calls its base's
        self._has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        if self._applies and not self._step_skipped and not self._has_closure:
            self._refuse_gradients_of_no_backward()
        if not self._applies or (self._step_skipped and not self._without_gradient):
            self._hide_gradients()
        elif isinstance(synchronizer, NativeSynchronizer) and not self._has_closure:
            synchronizer.refuse_unaveraged()

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
        synchronizer, own = session.attached, session.replicas_differ
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
        if isinstance(synchronizer, GradientSynchronizer):
            if synchronizer.is_good:
                if synchronizer.bad:  # a code has decoded the step from other ranks' answers
                    text = f"not used: gradients of {', '.join(synchronizer.bad)} are not finite"
                    self._events.add("nonfinite", self.step, text)
                    log.warning("rank %d, step %d: %s", self.rank, self.step, text)
                return
            synchronizer.is_good, names = True, synchronizer.bad
        elif not (names := not_finite(session.gradients)):
            return
        bad_gradients = session.context.bad_gradients
        are_own = own or isinstance(synchronizer, GradientSynchronizer)  # of this rank's backward
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
        self._compare_replicas()
        self._check_optimizer_state()

    def _check_optimizer_state(self) -> None:
        """Propose to average new optimizer state. Some appears only when a parameter is first used,
        or after skipped steps."""
        session, synchronizer = self._session, self._session.synchronizer
        if self.step % TRAINABLE_CHECK_PERIOD_STEPS or session.plan.what is not What.EVERYTHING:
            return
        assert isinstance(synchronizer, ParameterSynchronizer)
        if has_new_optimizer_state(session.optimizer, synchronizer.tensors):
            session.agreement.propose(SLOTS_CHANGE, True)

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
            before = session.synchronizer
            self.safe_point()
            if session.synchronizer is not before and isinstance(
                session.synchronizer, NativeSynchronizer
            ):
                session.synchronizer.join_forward()

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

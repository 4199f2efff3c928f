"""A training run under a plan: what `attach()` returns."""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import nn

from thalweg.catalog import parse_plan
from thalweg.engine.arrivals import Arrivals
from thalweg.errors import Mismatch, PlanError, RunError, ThalwegError
from thalweg.members.abort import AbortFlag
from thalweg.members.agreement import Change
from thalweg.members.world import World
from thalweg.observe import StepTotals, Straggler
from thalweg.observe.monitor import REPLICA_CHECK_PERIOD_STEPS
from thalweg.plan import Plan, What
from thalweg.predict import Advice
from thalweg.redundancy import is_coded, is_relayed, waits_for_nobody
from thalweg.training.auto.controller import ADVICE_CHANGE as ADVICE
from thalweg.training.auto.controller import AutoController, PlanControls
from thalweg.training.auto.measurement import RunCalibrator
from thalweg.training.auto.policy import PlanChoice
from thalweg.training.auto.request import allowed, is_auto
from thalweg.training.backward_hooks import Hook
from thalweg.training.coded_model_check import warn_of_what_differs, what_differs
from thalweg.training.compression_overlap import Timing
from thalweg.training.compressor_state import total_residuals
from thalweg.training.contention_monitor import CONTENTION_CHANGE, Adjustment, agreed_contention
from thalweg.training.data.loader import IsOver
from thalweg.training.digest import digest
from thalweg.training.exchanges.native import NativeSynchronizer
from thalweg.training.exchanges.server import AsynchronousSynchronizer
from thalweg.training.exchanges.tree import CodedSynchronizer
from thalweg.training.factory import is_native, trainable
from thalweg.training.finite import ReportedNames, not_finite
from thalweg.training.lifecycle import RankSession
from thalweg.training.membership_change import MembershipChange
from thalweg.training.optimizer_state import has_new_optimizer_state, statistics_of
from thalweg.training.recovery import Recovery
from thalweg.training.rendezvous import EpochTransition
from thalweg.training.sources.gradients import GradientSynchronizer, SteppedSynchronizer
from thalweg.training.sources.parameters import ParameterSynchronizer
from thalweg.training.step_timer import StepTimer

log = logging.getLogger("thalweg")
TRAINABLE_CHECK_PERIOD_STEPS = 8  # steps between two looks at which parameters are trained
SKIPPED_HISTORY_STEPS = 1000  # steps that were skipped
# Of the optimizer, that are not averaged: a change that has all ranks look again.
SLOTS_CHANGE = "slots"
DIFFERENCE_CHANGE = "difference"  # of replicas that are to be equal: a change that ends the run
SECOND_BACKWARD_ERROR = (
    "a backward followed one whose gradients were not finite, in the same step",
    "accumulate inside run.no_sync(), and zero the gradients after each step",
)
REPLICAS_DIFFER_REMEDY = (
    "check that host's memory and versions, and go on from a checkpoint; on hosts with different "
    "processors, which may round differently, set ATEN_CPU_CAPABILITY=default"
)


class Run:
    """A training run, as this worker sees it. Made by `attach()`."""

    def __init__(
        self,
        session: RankSession,
        asked: Plan,
        world: World,
        abort_flag: AbortFlag,
        transition: EpochTransition | None,
        records: Path | None,
        *,
        skips: bool,
    ) -> None:
        self._process = os.getpid()
        self._session = session
        self._regrouping = Recovery(self._session, transition, self._regrouped)
        self._session.set_members(world, abort_flag, self._regrouping.recover_step)
        self._asked = asked
        self._survival = transition
        self._course = session.data_position
        self._adjustments: list[Adjustment] = []
        self._autopilot: AutoController | None = None
        self._steers = is_auto(asked) and world.size > 1
        self._passed_safe_point = False
        self._shares_random = False
        self._without_gradient: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._hooks: list[Any] = []
        self._skips = skips  # steps whose gradients are not finite
        self._skipped: deque[tuple[int, str]] = deque(maxlen=SKIPPED_HISTORY_STEPS)
        self._is_over = False  # the step that the optimizer is about to take: it was skipped
        self._stepped_with: tuple[ref[torch.Tensor], int] | None = None  # a gradient, its version
        self._was_called = False  # the model, in this step
        self._suits_ddp = True  # the last step: the model was called, and used every parameter
        self._bad: list[tuple[torch.Tensor, int]] = []  # gradients, and their versions
        self._accumulates = False
        self._steps_now = 0  # calls of the optimizer's step that are under way, one in another
        self._has_closure = False  # the last one
        self._observer = StepTimer(self._session, lambda: self.arrivals, records, self._judge)
        if transition is not None:
            transition.on_change = self._observer.note_incident

    # What the script reads

    @property
    def rank(self) -> int:
        """This worker's number, from 0; it keeps it when others leave."""
        return self._session.rank

    @property
    def size(self) -> int:
        """How many workers train together now."""
        return self._session.group.size

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that train together now."""
        return self._session.world.members

    @property
    def formation(self) -> int:
        """How often the members have changed or met anew; 1 at first."""
        return 1 if self._survival is None else self._survival.membership_epoch.number

    @property
    def incidents(self) -> Sequence[MembershipChange]:
        """Who was found dead, silent or hanging, who came in, and when training went on."""
        return () if self._survival is None else tuple(self._survival.changes)

    @property
    def counts(self) -> bool:
        """Whether what the script computes now counts. Not in what is left of a round of its loop
        whose step was broken off, because members left or came: the step is redone in the next."""
        tree = self._session.tree
        return self._session.saved_objects is None and not (tree is not None and tree.has_diverged)

    @property
    def step(self) -> int:
        """How many steps the optimizer has taken."""
        return self._session.step

    @property
    def sync(self) -> str:
        """The plan that is run now."""
        return str(self._session.plan)

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop here."""
        return self._course.stopping

    @property
    def arrivals(self) -> Arrivals:
        """When this rank and its peers arrived at each bucket of the last steps."""
        tree = self._session.tree
        return self._session.engine.arrivals if tree is None else tree.arrivals

    @property
    def late(self) -> Sequence[Straggler]:
        """Who is late now and why, as the first of the members finds it: who computes longer than
        the others, whose NIC or uplink is slow; with the time that it costs. Empty if nobody is."""
        return self._observer.monitor.stragglers

    @property
    def latenesses(self) -> Sequence[tuple[int, Sequence[Straggler]]]:
        """From which step on who was late, each time that it changed."""
        return tuple(self._observer.monitor.changes)

    def summary(self) -> str:
        """A table of what the steps so far took on each rank, and who is late: on the first of the
        members; of this rank alone on the others."""
        return self._observer.summary()

    @property
    def tallies(self) -> Mapping[int, StepTotals]:
        """The figures of that table, by rank."""
        return dict(self._observer.monitor.step_totals)

    @property
    def refused(self) -> Mapping[str, int]:
        """What strangers and former members sent to this rank, in vain: how much, by why."""
        return {why.name.lower(): n for why, n in self._session.world.security.refused.items()}

    @property
    def skipped(self) -> Sequence[tuple[int, str]]:
        """The steps that this rank has skipped, because gradients were not finite, and whose."""
        return tuple(self._skipped)

    @property
    def adjustments(self) -> Sequence[Adjustment]:
        """What was kept apart in the groups of this run, since when, and why."""
        return tuple(self._adjustments)

    @property
    def choices(self) -> Sequence[PlanChoice]:
        """Under `auto`: which plans were run, since when and why, what was predicted of them, and
        what they took."""
        return () if self._autopilot is None else tuple(self._autopilot.choices)

    @property
    def advice(self) -> Advice | None:
        """Under `auto`: what it was last advised, on rank 0."""
        return None if self._autopilot is None else self._autopilot.advice

    @property
    def timings(self) -> Sequence[Timing]:
        """What the last steps took on this rank: backward, what of the averaging it didn't hide,
        and the compressor. Empty under plans that have no common steps or average parameters."""
        synchronizer = self._session.synchronizer
        return synchronizer.timings if isinstance(synchronizer, SteppedSynchronizer) else ()

    @property
    def catching_up(self) -> bool:
        """Whether this batch is only gone through, under a code: its step is over, and what came
        of it is applied."""
        return not self._course.counts

    @property
    def approximate(self) -> Mapping[int, float]:
        """Under a code with beyond=partial: the steps whose gradient was scaled up from a part of
        the batch, and how large that was."""
        synchronizer = self._session.synchronizer
        return synchronizer.approximate if isinstance(synchronizer, CodedSynchronizer) else {}

    # Data

    def epochs(self, number: int) -> Iterator[int]:
        """0, 1, ..., number - 1; a resumed run begins with the epoch it had reached."""
        yield from self._course.epochs(number)

    def batches(self, epoch: int) -> Iterator[Any]:
        """This rank's share of each batch; between two of them is the safe point, where plans
        change and runs stop."""
        yield from self._course.batches(epoch, self.safe_point, self._over)

    def _over(self) -> IsOver:
        step, tree = self.step, self._session.tree
        return lambda number: tree is not None and tree.has(step + number)

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on, from one loss a sample. Its value is this rank's plain mean
        under every plan; its gradient is weighed such that what the plan aggregates is the gradient
        of the mean over the whole batch of all ranks, whatever this rank's share of it is. So add
        what isn't of a sample (weight decay, auxiliary losses) to the losses, not to the mean."""
        return self._course.mean(losses)

    @contextmanager
    def shared_random(self) -> Iterator[None]:
        """Inside, torch's random numbers are the same for all workers that compute the same samples
        under a code: for dropout, which would make them differ. Afterwards they go on as if nothing
        had happened."""
        self._shares_random = True
        loader, batch_slice = self._course.rank_loader, self._course.batch_slice
        if loader is None or batch_slice is None:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(loader.seed_of(self.step, batch_slice))
            yield

    # Synchronising

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For gradient accumulation: backward adds up here, and averages with the next backward
        outside."""
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
        this rank's own again. Under a code nobody waits for anybody here either: parameters are
        equal anyway, statistics are this rank's own."""
        inside = ExitStack()
        self._work(lambda: inside.enter_context(self._session.averaged_replicas()))
        with inside:
            yield

    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite these floating-point tensors with their mean over all ranks; to be called on
        every rank, between two steps."""
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

        self._work(work)

    def left_out(self) -> dict[str, torch.Tensor]:
        """What this rank's compressor has left out of each parameter's gradient so far, divided by
        the number of ranks: added up over all ranks, what the mean gradient still lacks."""
        residuals = total_residuals(self._session.attached.compressor_state)
        return {name: torch.from_numpy(residual.copy()) for name, residual in residuals.items()}

    def drift(self) -> float:
        """How far the replicas' parameters are from their mean: the root of the mean square of
        that distance over all ranks. To be called on every rank, between two steps; nothing is
        changed. 0 if they are equal to the bit, as they should be under exact and lossy plans.
        RunError under plans that wait for nobody, where the others may be at another step."""
        if waits_for_nobody(self._session.plan):
            raise RunError(
                f"under {self.sync} nobody waits for anybody, so replicas aren't at one step",
                "switch to ring before; under a code the run ends by itself if they differ",
            )
        parameters = [p.detach() for p in self._session.trained.values()]
        means = [p.to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in parameters]
        self._average(
            means, lambda listed: self._session.collectives.all_reduce_mean_of_differing(listed)
        )
        pairs = zip(parameters, means, strict=True)
        squares = [(own - mean).double().square().sum().cpu() for own, mean in pairs]
        square = torch.stack(squares).sum()
        self.average([square])
        return float(square.sqrt())

    def switch(self, sync: str) -> None:
        """Propose another plan, on any rank: all ranks take it up at the same safe point."""
        self._session.refuse_what_does_not_run(parse_plan(sync))
        self._session.agreement.propose("sync", sync)

    def stop(self) -> None:
        """Propose to stop, on any rank: `run.batches` and `run.epochs` end at the same step on
        all."""
        self._session.agreement.propose("stop", True)

    def safe_point(self) -> None:
        """Take up what was agreed for this step. `run.batches` does so; with one's own loader the
        model's forward does."""
        if not self._has_closure or self._course.rank_loader is not None:
            self._steps_now = 0  # only a closure's forward is inside a step: this one has failed
        if self._passed_safe_point:
            return
        self._passed_safe_point = True
        session = self._session
        aside, session.saved_objects = session.saved_objects, None
        for part, saved in zip(session.state, aside or (), strict=aside is not None):
            part.load_state_dict(saved)
        self._refuse_new_parameters()
        with self._observer.blocked_between_steps("the safe point"):
            self._regrouping.safe_point(self._settle)
        self._shares_random = False

    def _settle(self) -> None:
        session = self._session
        self._observer.follow()
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
                self._course.stopping = True
            elif change.name == "sync":  # the last of several, as with groups
                plan = parse_plan(str(change.value))
            elif change.name == CONTENTION_CHANGE:
                groups = change
            elif change.name == SLOTS_CHANGE and isinstance(
                session.synchronizer, ParameterSynchronizer
            ):
                session.synchronizer.refresh_tensors()  # unless the plan is another by now
            elif change.name == DIFFERENCE_CHANGE:
                raise Mismatch(str(change.value), REPLICAS_DIFFER_REMEDY)
            elif change.name == ADVICE:
                drifted_to = float(str(change.value))
        if groups is not None and self._adjust(groups):
            drifted_to = None  # that may help already
        if plan is not None and plan != session.plan:
            self._regrouping.switch_plan(plan)
            if self.rank == 0:
                log.info("from step %d: %s, as run.switch asked", self.step, plan)
        if self._autopilot is not None:
            self._steer(self._autopilot, drifted_to, chosen=plan is not None)

    def _adjust(self, change: Change) -> bool:
        """Groups that keep something else apart; False if the plan has none any more."""
        synchronizer = self._session.synchronizer
        if not isinstance(synchronizer, ParameterSynchronizer) or not synchronizer.adjusts:
            return False
        contention, reason = agreed_contention(change.value)
        synchronizer.adopt(contention)
        made = Adjustment(step=change.step, kept_apart=str(contention), reason=reason)
        self._adjustments.append(made)
        self._observer.monitor.note("groups", made.step, str(made))
        if self._autopilot is not None:
            self._autopilot.adjusted()
        if self.rank == 0:
            log.info("%s", made)
        return True

    def save(self, directory: str | Path, *, keep: int = 2) -> None:
        """Write a checkpoint, which `attach(resume=directory)` goes on from; to be called on every
        rank. The newest `keep` are kept. The first rank writes; under a plan that waits for nobody
        the root does, alone."""
        self._work(lambda: self._session.save(Path(directory), keep))

    def _work(self, work: Callable[[], Any]) -> None:
        """What all do together between two steps."""
        with self._observer.blocked_between_steps("run.save, consensus or average before a step"):
            self._regrouping.run_collective(work)

    def close(self) -> None:
        """End this rank's part. Waits a moment for the others: what one has sent last, another
        may still have to read."""
        session = self._session
        if session.closed or os.getpid() != self._process:  # a fork is no rank
            return
        session.closed = True
        atexit.unregister(self.close)
        for hook in self._hooks:
            hook.remove()
        if self._autopilot is not None:
            self._autopilot.close()
        self._observer.close()
        if session.synchronizer is not None and not session.shutdown.failed:
            with suppress(ThalwegError):  # who has failed says so elsewhere
                session.synchronizer.detach()
        try:
            session.shutdown.leave(self.step, self._end)
        finally:
            if session.tree is not None:
                session.tree.close()
            if self._survival is not None:
                through = not session.shutdown.failed and not session.engine.failed
                self._survival.membership.close(finished=through)
            session.engine.close()
        self._observer.log_summary()

    def _end(self, seconds: float) -> bool:
        """Part, and leave word for those who come later."""
        session = self._session
        parted = self._part(seconds)
        if self._survival is None or not parted or session.shutdown.failed or session.engine.failed:
            return parted
        ends_alone = waits_for_nobody(session.plan) and self.rank != session.checkpoint_writer()
        if not ends_alone and session.abort_flag.poll() is None:
            self._survival.membership.end(self.step)
        return parted

    def _part(self, seconds: float) -> bool:
        """Wait until those who may still need this rank have ended too; False if they don't."""
        session = self._session
        if isinstance(session.synchronizer, AsynchronousSynchronizer):
            return session.synchronizer.leave(seconds)
        if session.tree is None:
            return self._regrouping.leave(seconds)
        if session.shutdown.failed or session.tree.is_closed:
            return True  # what it holds may be half a step, and isn't the end of the run
        self._course.leave_epoch()
        session.catch_up()
        return session.tree.leave(seconds, replace(session.snapshot(), ended=True))

    # What attach() does

    def start(self, resume: Path | None, *, returns: bool) -> None:
        """Begin from a checkpoint if there is one, else from rank 0's model; if this rank returns
        to a run that goes on, from another's."""
        session = self._session
        try:
            if returns:
                self._regrouping.rejoin()
            else:
                session.start(resume)
                self._steer_anew()
        except BaseException:
            self._observer.close()
            raise
        self._observer.begin(self.step)
        self._regrouping.start()
        self._hooks = [
            session.optimizer.register_step_pre_hook(Hook(lambda _, *given: self._steps(*given))),
            session.optimizer.register_step_post_hook(Hook(lambda *_: self._stepped())),
            session.model.register_forward_pre_hook(Hook(lambda *_: self._forward())),
        ]

    def _regrouped(self) -> None:
        """The members have met anew."""
        self._observer.follow()
        self._steer_anew()

    def _steer_anew(self) -> None:
        """Under `auto`: measure and choose for these members, if they are all there were."""
        session = self._session
        if self._autopilot is not None:
            self._autopilot.close()
            self._autopilot = None
        if self._steers and session.group.size == session.everybody.size:
            self._autopilot = AutoController(
                self._asked, session.context, session.collectives, self._helm(), self.step
            )

    def _steer(self, controller: AutoController, drifted_to: float | None, *, chosen: bool) -> None:
        """Until the script itself has chosen a plan."""
        if chosen:
            self._steers = False
            controller.close()
        if self._steers:
            controller.at_safe_point(self.step, drifted_to)

    def _helm(self) -> PlanControls:
        session = self._session
        return PlanControls(
            plan=lambda: session.plan,
            switch_plan=session.switch_plan,
            refuse=self._refuse_for_auto,
            calibrator=RunCalibrator(
                session.model, session.optimizer, session.context, allowed(self._asked)
            ),
        )

    def _refuse_for_auto(self, plan: Plan) -> None:
        """What can't be run, and codes where the script's last step shows that training would be
        another, or end with an error."""
        self._session.refuse_what_does_not_run(plan)
        if is_relayed(plan) and not self._course.weighed:
            raise PlanError(f"{plan} needs losses that run.mean has weighed", "use run.mean")
        if is_native(plan) and not self._suits_ddp:
            problem = f"{plan} needs a model that is called, and used whole, at every step"
            raise PlanError(problem, "use every parameter, or another plan")
        if is_coded(plan):
            for differs in what_differs(self._session.model, random=not self._shares_random):
                raise PlanError(*differs)

    # At the script's own steps

    def _steps(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Optimizers leave parameters without a gradient alone, and what they keep of these: so a
        step that doesn't count changes nothing."""
        synchronizer = self._session.synchronizer
        self._steps_now += 1
        if self._steps_now > 1:
            return  # torch calls hooks again where a subclass's step calls that of its base
        self._has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        if self.counts and not self._is_over and not self._has_closure:
            self._refuse_gradients_of_no_backward()
        if not self.counts or (self._is_over and not self._without_gradient):
            self._hide_gradients()
        elif isinstance(synchronizer, NativeSynchronizer) and not self._has_closure:
            synchronizer.refuse_unaveraged()

    def _refuse_gradients_of_no_backward(self) -> None:
        """Those of `torch.autograd.grad`, say, which nothing was told of. The gradients of the last
        step may be used again."""
        computed, self._observer.computed = self._observer.computed, False
        first = next((p.grad for p in self._session.trained.values() if p.grad is not None), None)
        if first is None:
            return
        before, self._stepped_with = self._stepped_with, (ref(first), first._version)
        again = before is not None and before[0]() is first and before[1] == first._version
        if computed or again:
            return
        if self._session.replicas_differ:
            self._judge()
        else:
            self._end_in(
                RunError(
                    "the optimizer steps with gradients that no backward has computed, and that no "
                    "other rank knows of",
                    "call backward on the loss, instead of writing to .grad",
                )
            )

    def _end_in(self, error: RunError) -> None:
        """Raise it, and tell the others, who wait for this rank."""
        with self._session.shutdown.publishing_errors():
            raise error

    def _hide_gradients(self) -> None:
        groups = self._session.optimizer.param_groups
        self._without_gradient = [(p, p.grad) for group in groups for p in group["params"]]
        for parameter, _ in self._without_gradient:
            parameter.grad = None

    def _judge(self) -> None:
        """At the end of backward: a step whose gradients are not finite is refused, or counted as
        over. A GradScaler won't call the optimizer then; if the script does, nothing is left to
        do."""
        session, was_over, self._is_over = self._session, self._is_over, False
        if self._steps_now and not self.counts:  # broken off in a closure, after the step began
            self._hide_gradients()
        if self._accumulates or session.closed or not self.counts:
            return
        if not getattr(session.model, "require_backward_grad_sync", True):
            return  # in the no_sync of a DDP object
        synchronizer, own = session.attached, session.replicas_differ
        if was_over and self._steps_now:  # the next look of a closure whose step was skipped
            self._hide_gradients()
            self._is_over = True
            return
        if (
            was_over
            and own
            and self._course.rank_loader is not None
            and not self._passed_safe_point
        ):
            self._end_in(RunError(*SECOND_BACKWARD_ERROR))
        if isinstance(synchronizer, GradientSynchronizer):
            if synchronizer.is_good:
                if (
                    synchronizer.bad
                ):  # under a code, which has decoded the step from others' answers
                    text = f"not used: gradients of {', '.join(synchronizer.bad)} are not finite"
                    self._observer.monitor.note("nonfinite", self.step, text)
                    log.warning("rank %d, step %d: %s", self.rank, self.step, text)
                return
            synchronizer.is_good, names = True, synchronizer.bad
        elif not (names := not_finite(session.gradients)):
            return
        found = session.context.bad_gradients
        knows = own or isinstance(synchronizer, GradientSynchronizer)  # whose gradients these are
        told: ReportedNames = {self.rank: names} if names and knows else {}
        if not own and not (told and self._skips and self.rank != self.members[0]):
            told = found.reports() or told
        error = found.error(told, names)
        if not self._skips:
            self._end_in(error)
        if spoilt := not_finite(statistics_of(session.model)):
            problem = f"{spoilt[0]} has inf or nan on rank {self.rank} at step {self.step}"
            self._end_in(
                RunError(
                    f"{problem}, which a skipped step leaves there",
                    "look at the data of that rank: what the model itself computed was not finite",
                )
            )
        if own:
            self._refuse_sums_of_skipped_gradients([session.gradients[name] for name in names])
        self._skipped.append((self.step, error.problem))
        self._observer.monitor.note("nonfinite", self.step, f"skipped: {error.problem}")
        if own or self.rank == self.members[0]:
            log.warning("skipped: %s", error.problem)
        if self._steps_now:  # in a closure
            self._hide_gradients()
        self._end_step()
        self._is_over = True

    def _refuse_sums_of_skipped_gradients(self, bad: Sequence[torch.Tensor]) -> None:
        """Each would count as a step, while the others have counted one. A gradient that was zeroed
        in between is another, or was written to twice."""
        for gradient, version in self._bad:
            if gradient._version <= version + 1 and any(gradient is other for other in bad):
                self._end_in(RunError(*SECOND_BACKWARD_ERROR))
        self._bad = [(gradient, gradient._version) for gradient in bad]

    def _stepped(self) -> None:
        self._steps_now -= 1
        if self._steps_now:
            return
        for parameter, gradient in self._without_gradient:
            parameter.grad = gradient
        self._without_gradient = []
        over, self._is_over = self._is_over, False
        if not over:
            self._end_step()

    def _end_step(self) -> None:
        session, timer = self._session, self._observer
        timer.stepped()
        if self.counts:
            session.attached.after_step()
        self._passed_safe_point = False
        if not self.counts:
            timer.begin(self.step)
            return
        timer.ended(self.step)
        if self._autopilot is not None and self._steers:
            used = all(p.grad is not None for p in session.trained.values())
            self._suits_ddp, self._was_called = used and self._was_called, False
            self._autopilot.stepped(self.step)
        if session.warns:
            warn_of_what_differs(session.model, random=not self._shares_random)
            session.warns = False
        session.clock.tick()
        self._regrouping.stepped()
        self._course.stepped()
        self._compare_replicas()
        self._look_for_slots()

    def _look_for_slots(self) -> None:
        """Where the optimizer's state is averaged: some may be there only since a parameter was
        used, or a step wasn't skipped."""
        session, synchronizer = self._session, self._session.synchronizer
        if self.step % TRAINABLE_CHECK_PERIOD_STEPS or session.plan.what is not What.EVERYTHING:
            return
        assert isinstance(synchronizer, ParameterSynchronizer)
        if has_new_optimizer_state(session.optimizer, synchronizer.tensors):
            session.agreement.propose(SLOTS_CHANGE, True)

    def _compare_replicas(self) -> None:
        """Hand in a digest now and then; if they differ, all ranks end at the same safe point."""
        session, monitor = self._session, self._observer.monitor
        if (
            self.size > 1
            and session.replicas_are_equal
            and not self.step % REPLICA_CHECK_PERIOD_STEPS
        ):
            monitor.submit_digest(self.step, digest(session.trained.values()))
        if monitor.difference:
            session.agreement.propose(DIFFERENCE_CHANGE, monitor.difference)
            monitor.difference = ""

    def _forward(self) -> None:
        """With one's own loader this is the safe point, if it is a step that begins."""
        session = self._session
        steps = session.model.training and torch.is_grad_enabled() and not session.in_consensus
        self._was_called = self._was_called or steps
        if steps and self._course.rank_loader is None:
            before = session.synchronizer
            self.safe_point()
            if session.synchronizer is not before and isinstance(
                session.synchronizer, NativeSynchronizer
            ):
                session.synchronizer.join_forward()

    def _refuse_new_parameters(self) -> None:
        """Looked at now and then: nobody would average them, and replicas would differ."""
        if self.step % TRAINABLE_CHECK_PERIOD_STEPS:
            return
        for name, parameter in trainable(self._session.model).items():
            if id(parameter) not in self._session.averaged:
                raise RunError(
                    f"parameter {name} was added or unfrozen after attach(), and isn't averaged",
                    "attach the model when it is complete",
                )

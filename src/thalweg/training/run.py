"""A training run under a plan: what `attach()` returns."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from thalweg.catalog import parse_plan
from thalweg.coding import allocation_of, is_relayed, spare_ranks, waits_for_nobody
from thalweg.errors import PlanError, RunError, ThalwegError
from thalweg.plan import Plan
from thalweg.predict import Advice
from thalweg.runtime import Agreement, Alarm, Arrivals, Change, Engine, World
from thalweg.schedules import Group
from thalweg.training.asked import allowed, is_auto, plan_at_first
from thalweg.training.asynchronous import AsynchronousAverager
from thalweg.training.auto import CHANGE as ADVICE
from thalweg.training.auto import Autopilot, Helm
from thalweg.training.averager import (
    Averager,
    Setting,
    refuse_what_cannot_run,
    trainable,
)
from thalweg.training.coded import CodedAverager, Tree
from thalweg.training.compression import refuse_second_momentum
from thalweg.training.course import Course
from thalweg.training.ending import Ending
from thalweg.training.feed import IsOver, weighted_mean
from thalweg.training.gradients import SteppedAverager
from thalweg.training.handover import State
from thalweg.training.held import Slots, folded, parts_that_add_up
from thalweg.training.hook import Hook
from thalweg.training.itinerary import Clock
from thalweg.training.overlap import Timing
from thalweg.training.owed import pay_back
from thalweg.training.parameters import ParameterAverager
from thalweg.training.replicas import refuse_what_differs, warn_of_what_differs
from thalweg.training.resume import load, save
from thalweg.training.sharing import Sharing
from thalweg.training.slots import slots_of_all
from thalweg.training.steering import Chosen
from thalweg.training.surveying import Surveyor
from thalweg.training.watch import CHANGE, Adjustment, contention_in

NOW_AND_THEN = 8  # steps between two looks at which parameters are trained


class Stateful(Protocol):
    """A scheduler, a scaler, or anything else that has to travel with the training."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Run:
    """Made by `attach()`."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        group: Group,
        world: World,
        engine: Engine,
        alarm: Alarm,
        ending: Ending,
        course: Course,
        state: Sequence[Stateful],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._asked = plan
        self._plan = plan_at_first(plan)
        self._group = group
        self._world = world
        self._engine = engine
        self._alarm = alarm
        self._ending = ending
        self._course = course
        self._state = tuple(state)
        self._clock = Clock()
        self._sharing = Sharing(group, engine, self._clock)
        self._agreement = Agreement(world.store, rank=world.rank, size=world.size)
        self._adjustments: list[Adjustment] = []
        self._autopilot: Autopilot | None = None
        self._steers = is_auto(plan) and world.size > 1
        self._setting = Setting(
            world=world,
            alarm=alarm,
            group=group,
            engine=engine,
            clock=self._clock,
            course=course,
            agreement=self._agreement,
            snapshot=self._snapshot,
        )
        self._agreed = 0  # changes that had taken effect before this step
        self._averager: Averager | None = None
        self._averaged: set[int] = set()  # parameters, by identity
        self._passed_safe_point = False
        self._shares_random = False
        self._warns = False
        self._closed = False
        self._in_consensus = False
        self._hooks: list[Any] = []
        self._meetings = 0  # at the store: saves and transitions

    # What the script reads

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self._world.size

    @property
    def step(self) -> int:
        """How many steps the optimizer has taken."""
        return self._clock.step

    @property
    def sync(self) -> str:
        """The plan that is run now."""
        return str(self._plan)

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop here."""
        return self._course.stopping

    @property
    def arrivals(self) -> Arrivals:
        """When this rank and its peers arrived at each bucket of the last steps."""
        return self._engine.arrivals if self._tree is None else self._tree.arrivals

    @property
    def adjustments(self) -> Sequence[Adjustment]:
        """What was kept apart in the groups of this run, since when, and why."""
        return tuple(self._adjustments)

    @property
    def choices(self) -> Sequence[Chosen]:
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
        return self._averager.timings if isinstance(self._averager, SteppedAverager) else ()

    @property
    def catching_up(self) -> bool:
        """Whether this batch is only gone through, under a code: its step is over, and what came
        of it is applied."""
        return not self._course.counts

    @property
    def approximate(self) -> Mapping[int, float]:
        """Under a code with beyond=partial: the steps whose gradient was scaled up from a part of
        the batch, and how large that was."""
        return self._averager.approximate if isinstance(self._averager, CodedAverager) else {}

    # Data

    def epochs(self, number: int) -> Iterator[int]:
        """0, 1, ..., number - 1; a resumed run begins with the epoch it had reached."""
        yield from self._course.epochs(number)

    def batches(self, epoch: int) -> Iterator[Any]:
        """This rank's share of each batch; between two of them is the safe point, where plans
        change and runs stop."""
        yield from self._course.batches(epoch, self.safe_point, self._over)

    def _over(self) -> IsOver:
        step = self.step
        return lambda number: self._tree is not None and self._tree.has(step + number)

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on, from one loss a sample: such that what the plan aggregates
        is the mean over the whole batch of all ranks, whatever this rank's share of it is."""
        return weighted_mean(losses, self._course.share)

    @contextmanager
    def shared_random(self) -> Iterator[None]:
        """Inside, torch's random numbers are the same for all workers that compute the same samples
        under a code: for dropout, which would make them differ. Afterwards they go on as if nothing
        had happened."""
        self._shares_random = True
        feed, share = self._course.feed, self._course.share
        if feed is None or share is None:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(feed.seed_of(self.step, share))
            yield

    # Synchronising

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For gradient accumulation: backward adds up here, and averages with the next backward
        outside."""
        with self._attached.no_sync():
            yield

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, all replicas are equal: parameters (under plans that let them differ) and
        statistics such as batch norm's are the mean over all ranks. Afterwards the parameters are
        this rank's own again. Under a code nobody waits for anybody here either: parameters are
        equal anyway, statistics are this rank's own."""
        self._attached.settle()
        if waits_for_nobody(self._plan):
            self._catch_up()
            yield
            return
        parameters = self._differing
        own = [parameter.detach().clone() for parameter in parameters]
        self._in_consensus = True
        try:
            self._sharing.average(parameter.detach() for parameter in parameters)
            self._sharing.average_what_differs(_statistics(self._model))
            yield
        finally:
            self._in_consensus = False
            with torch.no_grad():
                for parameter, values in zip(parameters, own, strict=True):
                    parameter.copy_(values)

    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite these floating-point tensors with their mean over all ranks; to be called on
        every rank, between two steps."""
        self._sharing.average(tensors)

    def left_out(self) -> dict[str, torch.Tensor]:
        """What this rank's compressor has left out of each parameter's gradient so far, divided by
        the number of ranks: added up over all ranks, what the mean gradient still lacks."""
        residuals = folded(self._attached.held)
        return {name: torch.from_numpy(residual.copy()) for name, residual in residuals.items()}

    def drift(self) -> float:
        """How far the replicas' parameters are from their mean: the root of the mean square of
        that distance over all ranks. To be called on every rank, between two steps; nothing is
        changed. 0 under plans that keep replicas equal."""
        if not self._replicas_differ:
            return 0.0
        parameters = [p.detach() for p in self._differing]
        means = [parameter.clone() for parameter in parameters]
        self.average(means)
        pairs = zip(parameters, means, strict=True)
        squares = [(own - mean).double().square().sum().cpu() for own, mean in pairs]
        square = torch.stack(squares).sum()
        self.average([square])
        return float(square.sqrt())

    @property
    def _differing(self) -> list[nn.Parameter]:
        """The parameters in which replicas differ: those that are or were trained."""
        parameters = self._model.parameters() if self._replicas_differ else ()
        return [parameter for parameter in parameters if id(parameter) in self._averaged]

    @property
    def _replicas_differ(self) -> bool:
        return self._plan.averages_parameters

    def switch(self, sync: str) -> None:
        """Propose another plan, on any rank: all ranks take it up at the same safe point."""
        self._refuse_what_does_not_run(parse_plan(sync))
        self._agreement.propose("sync", sync)

    def stop(self) -> None:
        """Propose to stop, on any rank: `run.batches` and `run.epochs` end at the same step on
        all."""
        self._agreement.propose("stop", True)

    def safe_point(self) -> None:
        """Take up what was agreed for this step. `run.batches` does so; with one's own loader the
        model's forward does."""
        if self._passed_safe_point:
            return
        self._passed_safe_point = True
        self._refuse_new_parameters()
        self._catch_up()
        if self._tree is not None:
            self._tree.serve()
        self._agreed = self._agreement.handed_out
        plan, groups, drifted_to = None, None, None
        for change in self._agreement.settle(self.step):
            if change.name == "stop":
                self._course.stopping = True
            elif change.name == "sync":  # the last of several, as with groups
                plan = parse_plan(str(change.value))
            elif change.name == CHANGE:
                groups = change
            elif change.name == ADVICE:
                drifted_to = float(str(change.value))
        if groups is not None and self._adjust(groups):
            drifted_to = None  # that may help already
        if plan is not None:
            self._take_up(plan)
        if self._autopilot is not None:
            self._steer(self._autopilot, drifted_to, chosen=plan is not None)

    def _steer(self, autopilot: Autopilot, drifted_to: float | None, *, chosen: bool) -> None:
        """Until the script itself has chosen a plan."""
        if chosen:
            self._steers = False
            autopilot.close()
        if self._steers:
            autopilot.at_safe_point(self.step, drifted_to)

    def _adjust(self, change: Change) -> bool:
        """Groups that keep something else apart; False if the plan has none any more."""
        if not isinstance(self._averager, ParameterAverager) or not self._averager.adjusts:
            return False
        contention, reason = contention_in(change.value)
        self._averager.adopt(contention)
        made = Adjustment(step=change.step, kept_apart=str(contention), reason=reason)
        self._adjustments.append(made)
        if self._autopilot is not None:
            self._autopilot.adjusted()
        if self.rank == 0:
            logging.getLogger("thalweg").info("%s", made)
        return True

    # Checkpoints

    def save(self, directory: str | Path, *, keep: int = 2) -> None:
        """Write a checkpoint, which `attach(resume=directory)` goes on from; to be called on every
        rank. The newest `keep` are kept. Rank 0 writes; under a plan that waits for nobody the root
        does, alone."""
        alone = waits_for_nobody(self._plan)
        self._meetings += not alone
        with self.consensus(), self._common_slots():
            if alone and self.rank != self._setting.keeper(self._plan):
                return
            save(
                Path(directory),
                world=self._world,
                alarm=self._alarm,
                timeout=self._engine.timeout,
                number=self._meetings,
                step=self.step,
                plan=str(self._plan),
                position=self._course.resume_at,
                sampling=self._sampling,
                model=_inner(self._model),
                optimizer=self._optimizer,
                state=self._state,
                held=self._attached.held,
                sharing=self._sharing,
                keep=keep,
                alone=alone,
            )

    def close(self) -> None:
        """End this rank's part. Waits a moment for the others: what one has sent last, another
        may still have to read."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for hook in self._hooks:
            hook.remove()
        if self._autopilot is not None:
            self._autopilot.close()
        if self._averager is not None and not self._ending.failed:
            with suppress(ThalwegError):  # who has failed says so elsewhere
                self._averager.detach()
        try:
            self._ending.leave(self.step, self._part)
        finally:
            if self._tree is not None:
                self._tree.close()
            self._engine.close()

    def _part(self, seconds: float) -> bool:
        """Wait until those who may still need this rank have ended too; False if they don't."""
        if isinstance(self._averager, AsynchronousAverager):
            return self._averager.part(seconds)
        if self._tree is None:
            return self._world.part(seconds, self._alarm)
        if self._ending.failed:
            return True  # what it holds may be half a step, and isn't the end of the run
        self._course.leave_epoch()
        self._catch_up()
        return self._tree.part(seconds, replace(self._snapshot(), ended=True))

    # What attach() does

    def start(self, resume: Path | None, *, returns: bool) -> None:
        """Begin from a checkpoint if there is one, else from rank 0's model; if this rank returns
        to a run that goes on, from another's."""
        if returns:
            self._come_back()
        else:
            self._begin(resume)
        if self._steers:
            self._autopilot = Autopilot(
                self._asked, self._setting, self._sharing, self._helm(), self.step
            )
        self._averaged = {id(parameter) for parameter in trainable(self._model).values()}
        self._hooks = [
            self._optimizer.register_step_post_hook(Hook(lambda *_: self._stepped())),
            self._model.register_forward_pre_hook(Hook(lambda *_: self._forward())),
        ]

    def _helm(self) -> Helm:
        return Helm(
            plan=lambda: self._plan,
            take_up=self._take_up,
            refuse=self._refuse_what_does_not_run,
            surveyor=Surveyor(
                self._model,
                self._optimizer,
                self._setting,
                allowed(self._asked),
                self._asked.settings.transport,
            ),
        )

    def _begin(self, resume: Path | None) -> None:
        loaded = None
        if resume is not None:
            loaded = load(
                resume,
                world=self._world,
                alarm=self._alarm,
                timeout=self._engine.timeout,
                reader=self._setting.keeper(self._plan),
                sharing=self._sharing,
                sampling=self._sampling,
                plan=str(self._plan),
                model=_inner(self._model),
                optimizer=self._optimizer,
                state=self._state,
            )
        if loaded is None:
            self._sharing.take_from(0, _tensors(self._model))
        else:
            self._clock.step = loaded.step
            self._course.jump(loaded.position)
        self._run_plan()
        if loaded is not None:
            self._go_on_with(loaded.held)

    def _come_back(self) -> None:
        self._plan, since = self._setting.plan_under_way()
        self._clock.step = since
        self._run_plan()
        if self._tree is not None:
            self._take_over(self._tree.take())

    def _refuse_what_does_not_run(self, plan: Plan) -> None:
        """From the next safe point on."""
        refuse_what_cannot_run(plan, self._group, has_data=self._course.feed is not None)
        self._refuse_what_does_not_suit(plan)
        if isinstance(self._model, nn.parallel.DistributedDataParallel):
            raise PlanError("a DDP object keeps its plan", "attach the model without DDP round it")
        if plan.settings.transport != self._plan.settings.transport:
            raise PlanError(
                f"{plan} has another transport than {self._plan}",
                "keep it, or start with the other",
            )

    def _refuse_what_does_not_suit(self, plan: Plan) -> None:
        """The data, the model or the optimizer."""
        refuse_second_momentum(plan, self._optimizer)
        if is_relayed(plan):
            allocation = allocation_of(plan, self._group)
            refuse_what_differs(self._model, allocation)
            if self._course.feed is not None:
                self._course.feed.under(allocation)

    def _run_plan(self) -> None:
        """From this step on."""
        self._refuse_what_does_not_suit(self._plan)
        self._course.watch()
        self._averager = self._setting.averager(self._model, self._optimizer, self._plan)
        self._ending.is_spare = self.rank in spare_ranks(self._plan, self._group)
        allocation = self._tree.allocation if self._tree else None
        if self._course.feed is not None:
            self._course.feed = self._course.feed.under(allocation)
        if self._tree is not None:
            self._warns = self._tree.is_root  # one of all is enough

    @property
    def _attached(self) -> Averager:
        if self._averager is None or self._closed:
            raise RunError("the run is closed", "attach the model again")
        return self._averager

    def _stepped(self) -> None:
        self._attached.after_step()
        if self._autopilot is not None and self._steers:
            self._autopilot.stepped(self.step)
        if self._warns:
            warn_of_what_differs(self._model, random=not self._shares_random)
            self._warns = False
        self._clock.tick()
        self._course.stepped()
        self._passed_safe_point = False

    def _forward(self) -> None:
        """With one's own loader this is the safe point, if it is a step that begins."""
        steps = self._model.training and torch.is_grad_enabled() and not self._in_consensus
        if steps and self._course.feed is None:
            self.safe_point()

    def _refuse_new_parameters(self) -> None:
        """Looked at now and then: nobody would average them, and replicas would differ."""
        if self.step % NOW_AND_THEN:
            return
        for name, parameter in trainable(self._model).items():
            if id(parameter) not in self._averaged:
                raise RunError(
                    f"parameter {name} was added or unfrozen after attach(), and isn't averaged",
                    "attach the model when it is complete",
                )

    @property
    def _sampling(self) -> dict[str, int]:
        return {} if self._course.feed is None else self._course.feed.sampling

    def _take_up(self, plan: Plan) -> None:
        """Leaving a plan under which replicas differ makes them equal once more."""
        self._attached.settle()
        held = parts_that_add_up(self._attached.held)
        self._attached.detach()
        if self._replicas_differ and not plan.averages_parameters:
            slots = self._slots()
            self._sharing.average(p.detach() for p in self._differing)
            self._sharing.average_what_differs([*_statistics(self._model), *slots])
        if isinstance(self._averager, AsynchronousAverager):
            self._averager.part(self._engine.timeout)
            self._sharing.take_from(self._setting.keeper(self._plan), self._slots())
        if self._tree is not None:
            # Those who come later have this change still before them.
            self._tree.part(self._engine.timeout, replace(self._snapshot(), agreed=self._agreed))
            self._tree.close()
        self._plan = plan
        self._run_plan()
        self._go_on_with(held)

    def _go_on_with(self, held: Slots) -> None:
        """What a compressor kept is this one's now, or is added to the next gradient; under a code,
        where several compute the same, it is dropped."""
        residuals = self._attached.take(held)
        if not is_relayed(self._plan):
            pay_back(dict(_inner(self._model).named_parameters()), residuals, self.size)

    @contextmanager
    def _common_slots(self) -> Iterator[None]:
        """Inside, the optimizer's state is the mean over all ranks, where it differs."""
        slots = self._slots() if self._replicas_differ else []
        own = [slot.clone() for slot in slots]
        try:
            self._sharing.average_what_differs(slots)
            yield
        finally:
            for slot, values in zip(slots, own, strict=True):
                slot.copy_(values)

    def _slots(self) -> list[torch.Tensor]:
        """The optimizer's, those included that only other ranks had until now."""
        self._meetings += 1
        slots = slots_of_all(
            self._optimizer, self._world, self._alarm, self._meetings, self._engine.timeout
        )
        return list(slots.values())

    # Under a code

    @property
    def _tree(self) -> Tree | None:
        return self._averager.tree if isinstance(self._averager, CodedAverager) else None

    def _catch_up(self) -> None:
        """Go on from another's state if the others are too far ahead to have their results."""
        if self._tree is not None and self._tree.left_behind(self.step):
            self._take_over(self._tree.take())

    def _snapshot(self) -> State:
        return State(
            step=self.step,
            position=self._course.position,
            meetings=self._meetings,
            shared=self._clock.shared,
            agreed=self._agreement.handed_out,
            ended=False,
            model=_inner(self._model).state_dict(),
            optimizer=self._optimizer.state_dict(),
            objects=[part.state_dict() for part in self._state],
        )

    def _take_over(self, state: State) -> None:
        """Go on as the one whose state this is."""

        def load() -> None:
            state.load_into(_inner(self._model), self._optimizer, self._state)

        load()
        self._clock.step, self._clock.shared = state.step, state.shared
        self._meetings = state.meetings
        self._course.jump(state.position, again=load)
        self._course.stopping = self._course.stopping or state.ended
        self._agreement.go_on_from(state.agreed)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*(p.detach() for p in model.parameters()), *model.buffers()]


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def _inner(model: nn.Module) -> nn.Module:
    """Without DDP round it: checkpoints don't know it."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    return inner

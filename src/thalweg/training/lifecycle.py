"""One rank's part of a run: what it trains, the plan that it runs, and the members it runs it with.

`form` sets it among the members of a formation; `run_plan` has a plan average what is trained, and
`take_up` another one after it. `snapshot` is what this rank holds before a step, and `take_over`
goes on with what another held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.catalog import default_catalog
from thalweg.engine.engine import Engine
from thalweg.errors import PlanError, RunError
from thalweg.members.abort import Alarm
from thalweg.members.agreement import Agreement
from thalweg.members.world import World
from thalweg.plan import Plan
from thalweg.redundancy import allocation_of, is_relayed, waits_for_nobody
from thalweg.schedules import Group
from thalweg.training.checkpoint_io import Resumable, load, save
from thalweg.training.coded_model_check import refuse_what_differs
from thalweg.training.compiled_steps import Clock
from thalweg.training.compressor_state import Slots, parts_that_add_up, pay_back
from thalweg.training.data.loader import Feed
from thalweg.training.data.position import Course
from thalweg.training.exchanges.compressed import refuse_second_momentum
from thalweg.training.exchanges.server import AsynchronousAverager, Ledger
from thalweg.training.exchanges.tree import CodedAverager, Tree
from thalweg.training.factory import Averager, Setting, refuse_what_cannot_run, trainable
from thalweg.training.finite import BadGradients
from thalweg.training.optimizer_state import slots_of_all
from thalweg.training.sharing import Sharing
from thalweg.training.shutdown import Ending
from thalweg.training.snapshot import State, Stateful

log = logging.getLogger("thalweg")
MEETINGS = 1000  # at the store before a step, at most


class Session:
    """`plan` is the one that is run, `group` the members now, `begins` the first step that they
    take together."""

    world: World
    alarm: Alarm
    group: Group
    sharing: Sharing
    agreement: Agreement
    setting: Setting

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        group: Group,
        engine: Engine,
        ending: Ending,
        course: Course,
        state: Sequence[Stateful],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self._protected = default_catalog().guarantee(plan).protected  # as it was asked for
        self.everybody = group
        self.engine = engine
        self.ending = ending
        self.course = course
        self.state = tuple(state)
        self.clock = Clock()
        self.averager: Averager | None = None
        self.trained = trainable(inner(model))  # when the run began
        self.averaged = {id(parameter) for parameter in self.trained.values()}
        self.begins = 0
        self.agreed = 0  # changes that had taken effect before this step
        self.ledger = Ledger()
        self.aside: list[Any] | None = None  # state= objects, as they were before a broken step
        self.in_consensus = False
        self.warns = False  # once, of what differs between replicas under a code
        self.closed = False
        self._meetings = 0  # at the store before this step: saves and transitions
        self._met_before = 0  # this step
        self._next_feed: Feed | None = None  # of the step that members begin with
        self._held: Slots = {}  # of the compressor, what is equal on all ranks

    # What it is

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def step(self) -> int:
        return self.clock.step

    @property
    def attached(self) -> Averager:
        if self.averager is None or self.closed:
            raise RunError("the run is closed", "attach the model again")
        return self.averager

    @property
    def tree(self) -> Tree | None:
        """This rank's place in a coded tree, under such a plan."""
        return self.averager.tree if isinstance(self.averager, CodedAverager) else None

    @property
    def replicas_differ(self) -> bool:
        return self.plan.averages_parameters

    @property
    def replicas_are_equal(self) -> bool:
        """Whether all ranks hold the same after as many steps: not while a server has it."""
        return not self.replicas_differ and self.plan.cadence.staleness is None

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Those that are there."""
        return {name: p.grad for name, p in self.trained.items() if p.grad is not None}

    @property
    def keeps_own(self) -> bool:
        """Whether every rank keeps what it holds, and its own place, when members change."""
        return self.replicas_differ or self.plan.cadence.staleness is not None

    def keeper(self) -> int:
        """The rank that writes and reads checkpoints."""
        return self.setting.keeper(self.plan)

    # Members and plans

    def form(
        self, world: World, alarm: Alarm, broken_off: Callable[[], None], root: int | None = None
    ) -> None:
        """Of these members alone, from now on; `broken_off` is called when a step of theirs is.
        `root` is the one that has the newest parameters, where only one has."""
        self.world, self.alarm = world, alarm
        self.ending.alarm = alarm
        self.group = self.everybody.subgroup(world.members)
        self._meetings = 0
        self._next_feed = None
        self.sharing = Sharing(self.group, self.engine, self.clock)
        self.agreement = Agreement(
            world.store,
            rank=world.rank,
            size=world.size,
            # who is behind under such a plan goes on from another's state
            awaits=lambda: () if is_relayed(self.plan) else world.members,
        )
        self.setting = Setting(
            world=world,
            alarm=alarm,
            group=self.group,
            engine=self.engine,
            clock=self.clock,
            course=self.course,
            agreement=self.agreement,
            bad_gradients=BadGradients(world, self.clock),
            snapshot=self.snapshot,
            broken_off=broken_off,
            begins=self.begins,
            root=root,
            ledger=self.ledger,
        )

    @contextmanager
    def among(self, members: tuple[int, ...]) -> Iterator[None]:
        """Inside, only these of the members share what is shared."""
        if members == self.world.members:
            yield
            return
        world, sharing = self.world, self.sharing
        self.world = replace(world, members=members)
        self.sharing = Sharing(self.group.subgroup(members), self.engine, self.clock)
        try:
            yield
        finally:
            self.world, self.sharing = world, sharing

    def refuse_what_does_not_run(self, plan: Plan) -> None:
        """From the next safe point on. It is asked where a plan is proposed, and by every rank
        where one is taken up: anybody who reaches the store can write one there."""
        refuse_what_cannot_run(plan, self.group, has_data=self.course.feed is not None)
        self._refuse_what_does_not_suit(plan)
        lowers = self._protected and not default_catalog().guarantee(plan).protected
        if lowers and self.world.protection.encrypted:
            raise PlanError(
                f"{plan} would send over torch's own connections, which are neither authenticated "
                "nor encrypted, in a run whose connections are",
                "name it in attach() if you trust the network; if you haven't named it at all, "
                "somebody else writes to the run's store",
            )
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            raise PlanError("a DDP object keeps its plan", "attach the model without DDP round it")

    def _refuse_what_does_not_suit(self, plan: Plan) -> None:
        """The data, the model or the optimizer."""
        refuse_second_momentum(plan, self.optimizer)
        if is_relayed(plan):
            allocation = allocation_of(plan, self.group)
            refuse_what_differs(self.model, allocation)
            if self.course.feed is not None:
                self.course.feed.under(allocation)

    def run_plan(self) -> None:
        """From this step on."""
        self._refuse_what_does_not_suit(self.plan)
        self.course.watch()
        self.averager = self.setting.averager(self.model, self.optimizer, self.plan)
        self.ending.is_spare = waits_for_nobody(self.plan) and self.rank != self.keeper()
        allocation = self.tree.allocation if self.tree else None
        if self.course.feed is not None:
            self._next_feed = self.course.feed.among(self.world.members, allocation)
            if self.step >= self.begins:
                self.begin()
        if self.tree is not None:
            self.warns = self.tree.is_root  # one of all is enough

    def begin(self) -> None:
        """Share out the data as the members do who begin with this step."""
        if self._next_feed is not None:
            self.course.feed, self._next_feed = self._next_feed, None

    def take_up(self, plan: Plan) -> None:
        """Leaving a plan under which replicas differ makes them equal once more."""
        self.refuse_what_does_not_run(plan)
        self.attached.settle()
        held = parts_that_add_up(self.attached.held)
        self.attached.detach()
        if self.replicas_differ and not plan.averages_parameters:
            slots = self._slots()
            self.sharing.average(p.detach() for p in self.differing)
            self.sharing.average_what_differs([*_statistics(self.model), *slots])
        if isinstance(self.averager, AsynchronousAverager):
            self.averager.part(self.engine.timeout)
            self.sharing.take_from(self.keeper(), self._slots())
            self.ledger = Ledger()
            self.setting = replace(self.setting, root=None, ledger=self.ledger)
        if self.tree is not None:
            # Those who come later have this change still before them.
            self.tree.part(self.engine.timeout, replace(self.snapshot(), agreed=self.agreed))
            self.tree.close()
        self.plan = plan
        self.run_plan()
        self.go_on_with(held)

    def go_on_with(self, held: Slots) -> None:
        """What a compressor kept is this one's now, or is added to the next gradient; under a code,
        where several compute the same, it is dropped."""
        residuals = self.attached.take(held)
        if not is_relayed(self.plan):
            pay_back(dict(inner(self.model).named_parameters()), residuals, self.group.size)

    # What replicas share

    @property
    def differing(self) -> list[nn.Parameter]:
        """The parameters in which replicas differ: those that are or were trained."""
        return list(self.trained.values()) if self.replicas_differ else []

    @contextmanager
    def equalised(self) -> Iterator[None]:
        """Inside, all replicas are equal; afterwards the parameters are this rank's own again."""
        self.attached.settle()
        if waits_for_nobody(self.plan):
            self.catch_up()
            yield
            return
        parameters = self.differing
        own = [parameter.detach().clone() for parameter in parameters]
        self.in_consensus = True
        try:
            self.sharing.average(parameter.detach() for parameter in parameters)
            self.sharing.average_what_differs(_statistics(self.model))
            yield
        finally:
            self.in_consensus = False
            with torch.no_grad():
                for parameter, values in zip(parameters, own, strict=True):
                    parameter.copy_(values)

    @contextmanager
    def _common_slots(self) -> Iterator[None]:
        """Inside, the optimizer's state is the mean over all ranks, where it differs."""
        slots = self._slots() if self.replicas_differ else []
        own = [slot.clone() for slot in slots]
        try:
            self.sharing.average_what_differs(slots)
            yield
        finally:
            for slot, values in zip(slots, own, strict=True):
                slot.copy_(values)

    def _slots(self) -> list[torch.Tensor]:
        """The optimizer's, those included that only other ranks had until now."""
        number = self._next_meeting()
        slots = slots_of_all(self.optimizer, self.world, self.alarm, number, self.engine.timeout)
        return list(slots.values())

    def _next_meeting(self) -> int:
        """Its number in the store: the same for all who are at it, also for one that has come in
        since the last."""
        if self._met_before != self.step:
            self._met_before, self._meetings = self.step, 0
        self._meetings += 1
        return MEETINGS * self.step + self._meetings

    # Checkpoints

    def save(self, directory: Path, keep: int) -> None:
        alone = waits_for_nobody(self.plan)
        number = 0 if alone else self._next_meeting()
        with self.equalised(), self._common_slots():
            if alone and self.rank != self.keeper():
                return
            save(
                directory,
                self._resumable,
                number=number,
                step=self.step,
                position=self.course.resume_at,
                held=self.attached.held,
                keep=keep,
                alone=alone,
            )

    def start(self, resume: Path | None) -> None:
        """From a checkpoint if there is one, else from rank 0's model."""
        loaded = None
        if resume is not None:
            loaded = load(resume, self._resumable, self.keeper())
        if loaded is None:
            model = self.model
            self.sharing.take_from(0, [*(p.detach() for p in model.parameters()), *model.buffers()])
        else:
            self.clock.step = loaded.step
            self.course.jump(loaded.position)
        self.run_plan()
        if loaded is not None:
            self.go_on_with(loaded.held)

    @property
    def _resumable(self) -> Resumable:
        return Resumable(
            world=self.world,
            alarm=self.alarm,
            timeout=self.engine.timeout,
            sharing=self.sharing,
            plan=str(self.plan),
            sampling={} if self.course.feed is None else self.course.feed.sampling,
            model=inner(self.model),
            optimizer=self.optimizer,
            state=self.state,
        )

    # States

    def snapshot(self) -> State:
        objects = self.aside  # what the script has made of them since doesn't count
        if objects is None:
            objects = [part.state_dict() for part in self.state]
        return State(
            step=self.step,
            position=self.course.position,
            shared=self.clock.shared,
            agreed=self.agreement.handed_out,
            ended=False,
            plan=str(self.plan),
            model=inner(self.model).state_dict(),
            optimizer=self.optimizer.state_dict(),
            objects=objects,
            held={
                kind: {name: torch.from_numpy(array) for name, array in arrays.items()}
                for kind, arrays in self._held.items()
            },
        )

    @contextmanager
    def holding(self, held: Slots) -> Iterator[None]:
        """Inside, snapshots have what a compressor holds that isn't at work now."""
        self._held = held
        try:
            yield
        finally:
            self._held = {}

    def take_over(self, state: State) -> None:
        """Go on as the one whose state this is."""
        state.load_into(inner(self.model), self.optimizer, self.state)
        self.clock.go_to(state.step)
        self.clock.shared = state.shared
        self.course.jump(state.position, again=state.settings(self.optimizer, self.state))
        self.course.stopping = self.course.stopping or state.ended
        self.agreement.go_on_from(state.agreed)

    def catch_up(self) -> None:
        """Under a code: go on from another's state if the others are too far ahead to have their
        results. Under `asp`: leave out the steps that the others took while this rank was away."""
        if self.tree is not None and self.tree.left_behind(self.step):
            self.take_over(self.tree.take(after=self.step))
        behind = self.averager.behind if isinstance(self.averager, AsynchronousAverager) else 0
        if behind:
            log.warning("rank %d was away: its share of %d steps is dropped", self.rank, behind)
            if self.course.feed is not None:
                self.course.skip(behind)
            self.clock.go_to(self.step + behind)


def inner(model: nn.Module) -> nn.Module:
    """Without DDP round it: checkpoints don't know it."""
    found = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(found, nn.Module)
    return found


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]

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
from thalweg.engine.collectives import Collectives, RoundCounter
from thalweg.engine.engine import Engine
from thalweg.errors import PlanError, RunError
from thalweg.members.abort import AbortFlag
from thalweg.members.agreement import Agreement
from thalweg.members.world import World
from thalweg.plan import Plan
from thalweg.redundancy import allocation_of, is_relayed, waits_for_nobody
from thalweg.schedules import Group
from thalweg.steps import refuse_what_cannot_run
from thalweg.training.checkpoint_io import Resumable, load, save
from thalweg.training.coded_model_check import refuse_what_differs
from thalweg.training.compressor_state import CompressorState, add_to_next_gradient, summable_state
from thalweg.training.data.loader import RankLoader
from thalweg.training.data.position import DataPosition
from thalweg.training.exchanges.compressed import refuse_second_momentum
from thalweg.training.exchanges.server import AsynchronousSynchronizer, Ledger
from thalweg.training.exchanges.tree import CodedSynchronizer, TreeMember
from thalweg.training.factory import PlanContext, Synchronizer, trainable
from thalweg.training.finite import BadGradients
from thalweg.training.optimizer_state import optimizer_state_of_all
from thalweg.training.shutdown import Shutdown
from thalweg.training.snapshot import Snapshot, Stateful

log = logging.getLogger("thalweg")
MAX_BARRIERS_PER_STEP = 1000  # at the store before a step, at most


class RankSession:
    """`plan` is the one that is run, `group` the members now, `begins` the first step that they
    take together."""

    world: World
    abort_flag: AbortFlag
    group: Group
    collectives: Collectives
    agreement: Agreement
    context: PlanContext

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        group: Group,
        engine: Engine,
        shutdown: Shutdown,
        data_position: DataPosition,
        state: Sequence[Stateful],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self._protected = default_catalog().guarantee(plan).protected  # as it was asked for
        self.everybody = group
        self.engine = engine
        self.shutdown = shutdown
        self.data_position = data_position
        self.state = tuple(state)
        self.clock = RoundCounter()
        self.synchronizer: Synchronizer | None = None
        self.trained = trainable(inner(model))  # when the run began
        self.averaged = {id(parameter) for parameter in self.trained.values()}
        self.first_step = 0
        self.agreed = 0  # changes that had taken effect before this step
        self.ledger = Ledger()
        self.saved_objects: list[Any] | None = (
            None  # state= objects, as they were before a broken step
        )
        self.in_consensus = False
        self.warns = False  # once, of what differs between replicas under a code
        self.closed = False
        self._store_exchanges = 0  # at the store before this step: saves and transitions
        self._store_exchanges_step = 0  # this step
        self._next_loader: RankLoader | None = None  # of the step that members begin with
        self._compressor_state: CompressorState = {}  # what is equal on all ranks

    # What it is

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def step(self) -> int:
        return self.clock.step

    @property
    def attached(self) -> Synchronizer:
        if self.synchronizer is None or self.closed:
            raise RunError("the run is closed", "attach the model again")
        return self.synchronizer

    @property
    def tree(self) -> TreeMember | None:
        """This rank's place in a coded tree, under such a plan."""
        return self.synchronizer.tree if isinstance(self.synchronizer, CodedSynchronizer) else None

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

    def checkpoint_writer(self) -> int:
        """The rank that writes and reads checkpoints."""
        return self.context.checkpoint_writer(self.plan)

    # Members and plans

    def set_members(
        self,
        world: World,
        abort_flag: AbortFlag,
        broken_off: Callable[[], None],
        root: int | None = None,
    ) -> None:
        """Of these members alone, from now on; `broken_off` is called when a step of theirs is.
        `root` is the one that has the newest parameters, where only one has."""
        self.world, self.abort_flag = world, abort_flag
        self.shutdown.abort_flag = abort_flag
        self.group = self.everybody.subgroup(world.members)
        self._store_exchanges = 0
        self._next_loader = None
        self.collectives = Collectives(self.group, self.engine, self.clock)
        self.agreement = Agreement(
            world.store,
            rank=world.rank,
            size=world.size,
            # who is behind under such a plan goes on from another's state
            awaits=lambda: () if is_relayed(self.plan) else world.members,
        )
        self.context = PlanContext(
            world=world,
            abort_flag=abort_flag,
            group=self.group,
            engine=self.engine,
            clock=self.clock,
            data_position=self.data_position,
            agreement=self.agreement,
            bad_gradients=BadGradients(world, self.clock),
            snapshot=self.snapshot,
            on_interrupted=broken_off,
            first_step=self.first_step,
            root=root,
            ledger=self.ledger,
        )

    @contextmanager
    def restricted_to(self, members: tuple[int, ...]) -> Iterator[None]:
        """Inside, only these of the members share what is shared."""
        if members == self.world.members:
            yield
            return
        world, collectives = self.world, self.collectives
        self.world = replace(world, members=members)
        self.collectives = Collectives(self.group.subgroup(members), self.engine, self.clock)
        try:
            yield
        finally:
            self.world, self.collectives = world, collectives

    def refuse_what_does_not_run(self, plan: Plan) -> None:
        """From the next safe point on. It is asked where a plan is proposed, and by every rank
        where one is taken up: anybody who reaches the store can write one there."""
        refuse_what_cannot_run(
            plan, self.group, has_data=self.data_position.rank_loader is not None
        )
        self._refuse_what_does_not_suit(plan)
        lowers = self._protected and not default_catalog().guarantee(plan).protected
        if lowers and self.world.security.encrypted:
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
            if self.data_position.rank_loader is not None:
                self.data_position.rank_loader.with_allocation(allocation)

    def run_plan(self) -> None:
        """From this step on."""
        self._refuse_what_does_not_suit(self.plan)
        self.data_position.start_checks()
        self.synchronizer = self.context.synchronizer(self.model, self.optimizer, self.plan)
        self.shutdown.is_spare = (
            waits_for_nobody(self.plan) and self.rank != self.checkpoint_writer()
        )
        allocation = self.tree.allocation if self.tree else None
        if self.data_position.rank_loader is not None:
            self._next_loader = self.data_position.rank_loader.with_members(
                self.world.members, allocation
            )
            if self.step >= self.first_step:
                self.begin()
        if self.tree is not None:
            self.warns = self.tree.is_root  # one of all is enough

    def begin(self) -> None:
        """Share out the data as the members do who begin with this step."""
        if self._next_loader is not None:
            self.data_position.rank_loader, self._next_loader = self._next_loader, None

    def switch_plan(self, plan: Plan) -> None:
        """Leaving a plan under which replicas differ makes them equal once more."""
        self.refuse_what_does_not_run(plan)
        self.attached.wait_and_apply()
        held = summable_state(self.attached.compressor_state)
        self.attached.detach()
        if self.replicas_differ and not plan.averages_parameters:
            slots = self._optimizer_state()
            self.collectives.all_reduce_mean(p.detach() for p in self.differing)
            self.collectives.all_reduce_mean_of_differing([*_statistics(self.model), *slots])
        if isinstance(self.synchronizer, AsynchronousSynchronizer):
            self.synchronizer.leave(self.engine.timeout)
            self.collectives.broadcast(self.checkpoint_writer(), self._optimizer_state())
            self.ledger = Ledger()
            self.context = replace(self.context, root=None, ledger=self.ledger)
        if self.tree is not None:
            # Those who come later have this change still before them.
            self.tree.leave(self.engine.timeout, replace(self.snapshot(), agreed=self.agreed))
            self.tree.close()
        self.plan = plan
        self.run_plan()
        self.load_compressor_state(held)

    def load_compressor_state(self, held: CompressorState) -> None:
        """What a compressor kept is this one's now, or is added to the next gradient; under a code,
        where several compute the same, it is dropped."""
        residuals = self.attached.load_compressor_state(held)
        if not is_relayed(self.plan):
            add_to_next_gradient(
                dict(inner(self.model).named_parameters()), residuals, self.group.size
            )

    # What replicas share

    @property
    def differing(self) -> list[nn.Parameter]:
        """The parameters in which replicas differ: those that are or were trained."""
        return list(self.trained.values()) if self.replicas_differ else []

    @contextmanager
    def averaged_replicas(self) -> Iterator[None]:
        """Inside, all replicas are equal; afterwards the parameters are this rank's own again."""
        self.attached.wait_and_apply()
        if waits_for_nobody(self.plan):
            self.catch_up()
            yield
            return
        parameters = self.differing
        own = [parameter.detach().clone() for parameter in parameters]
        self.in_consensus = True
        try:
            self.collectives.all_reduce_mean(parameter.detach() for parameter in parameters)
            self.collectives.all_reduce_mean_of_differing(_statistics(self.model))
            yield
        finally:
            self.in_consensus = False
            with torch.no_grad():
                for parameter, values in zip(parameters, own, strict=True):
                    parameter.copy_(values)

    @contextmanager
    def _averaged_optimizer_state(self) -> Iterator[None]:
        """Inside, the optimizer's state is the mean over all ranks, where it differs."""
        slots = self._optimizer_state() if self.replicas_differ else []
        own = [slot.clone() for slot in slots]
        try:
            self.collectives.all_reduce_mean_of_differing(slots)
            yield
        finally:
            for slot, values in zip(slots, own, strict=True):
                slot.copy_(values)

    def _optimizer_state(self) -> list[torch.Tensor]:
        """The optimizer's, those included that only other ranks had until now."""
        number = self._next_store_exchange()
        slots = optimizer_state_of_all(
            self.optimizer, self.world, self.abort_flag, number, self.engine.timeout
        )
        return list(slots.values())

    def _next_store_exchange(self) -> int:
        """Its number in the store: the same for all who are at it, also for one that has come in
        since the last."""
        if self._store_exchanges_step != self.step:
            self._store_exchanges_step, self._store_exchanges = self.step, 0
        self._store_exchanges += 1
        return MAX_BARRIERS_PER_STEP * self.step + self._store_exchanges

    # Checkpoints

    def save(self, directory: Path, keep: int) -> None:
        alone = waits_for_nobody(self.plan)
        number = 0 if alone else self._next_store_exchange()
        with self.averaged_replicas(), self._averaged_optimizer_state():
            if alone and self.rank != self.checkpoint_writer():
                return
            save(
                directory,
                self._resumable,
                number=number,
                step=self.step,
                position=self.data_position.resume_at,
                held=self.attached.compressor_state,
                keep=keep,
                alone=alone,
            )

    def start(self, resume: Path | None) -> None:
        """From a checkpoint if there is one, else from rank 0's model."""
        loaded = None
        if resume is not None:
            loaded = load(resume, self._resumable, self.checkpoint_writer())
        if loaded is None:
            model = self.model
            self.collectives.broadcast(
                0, [*(p.detach() for p in model.parameters()), *model.buffers()]
            )
        else:
            self.clock.step = loaded.step
            self.data_position.jump(loaded.position)
        self.run_plan()
        if loaded is not None:
            self.load_compressor_state(loaded.compressor_state)

    @property
    def _resumable(self) -> Resumable:
        return Resumable(
            world=self.world,
            abort_flag=self.abort_flag,
            timeout=self.engine.timeout,
            collectives=self.collectives,
            plan=str(self.plan),
            sampling={}
            if self.data_position.rank_loader is None
            else self.data_position.rank_loader.sampling,
            model=inner(self.model),
            optimizer=self.optimizer,
            state=self.state,
        )

    # States

    def snapshot(self) -> Snapshot:
        objects = self.saved_objects  # what the script has made of them since doesn't count
        if objects is None:
            objects = [part.state_dict() for part in self.state]
        return Snapshot(
            step=self.step,
            position=self.data_position.position,
            shared=self.clock.shared,
            agreed=self.agreement.effective_count,
            ended=False,
            plan=str(self.plan),
            model=inner(self.model).state_dict(),
            optimizer=self.optimizer.state_dict(),
            objects=objects,
            held={
                kind: {name: torch.from_numpy(array) for name, array in arrays.items()}
                for kind, arrays in self._compressor_state.items()
            },
        )

    @contextmanager
    def holding(self, held: CompressorState) -> Iterator[None]:
        """Inside, snapshots have what a compressor holds that isn't at work now."""
        self._compressor_state = held
        try:
            yield
        finally:
            self._compressor_state = {}

    def load_snapshot(self, state: Snapshot) -> None:
        """Go on as the one whose state this is."""
        state.load_into(inner(self.model), self.optimizer, self.state)
        self.clock.go_to(state.step)
        self.clock.shared = state.shared
        self.data_position.jump(state.position, again=state.settings(self.optimizer, self.state))
        self.data_position.stopping = self.data_position.stopping or state.ended
        self.agreement.resume_from(state.agreed)

    def catch_up(self) -> None:
        """Under a code: go on from another's state if the others are too far ahead to have their
        results. Under `asp`: leave out the steps that the others took while this rank was away."""
        if self.tree is not None and self.tree.left_behind(self.step):
            self.load_snapshot(self.tree.request_snapshot(after=self.step))
        behind = (
            self.synchronizer.behind
            if isinstance(self.synchronizer, AsynchronousSynchronizer)
            else 0
        )
        if behind:
            log.warning("rank %d was away: its share of %d steps is dropped", self.rank, behind)
            if self.data_position.rank_loader is not None:
                self.data_position.skip(behind)
            self.clock.go_to(self.step + behind)


def inner(model: nn.Module) -> nn.Module:
    """Without DDP round it: checkpoints don't know it."""
    found = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(found, nn.Module)
    return found


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]

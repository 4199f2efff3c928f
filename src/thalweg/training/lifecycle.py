"""One rank's part of a run: the model it trains, the plan it runs, and the members it runs with.

`set_members` enters a membership epoch; `run_plan` starts a plan, and `switch_plan` replaces it by
another. `snapshot` is this rank's state before a step, and `load_snapshot` continues from another
rank's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
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
from thalweg.training.coded_model_check import refuse_what_differs
from thalweg.training.data.loader import RankLoader
from thalweg.training.data.position import DataPosition
from thalweg.training.exchanges.compressed import refuse_second_momentum
from thalweg.training.exchanges.server import AsynchronousSynchronizer
from thalweg.training.exchanges.tree import TreeExchange
from thalweg.training.factory import synchronizer_of, trainable
from thalweg.training.finite import BadGradients
from thalweg.training.optimizer_state import optimizer_state_of_all
from thalweg.training.plan_context import Ledger, PlanContext
from thalweg.training.plan_state import PlanState, add_to_next_gradient, summands
from thalweg.training.shutdown import Shutdown
from thalweg.training.snapshot import Snapshot, Stateful
from thalweg.training.synchronizer import Synchronizer

log = logging.getLogger("thalweg")
MAX_BARRIERS_PER_STEP = 1000  # exchanges at the store before one step


class RankSession:
    """The state of one rank in a run: `plan` is the one that runs, `group` the members now, and
    `first_step` the first step that they take together."""

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
        self._protected = default_catalog().guarantee(plan).protected
        self.everybody = group
        self.engine = engine
        self.shutdown = shutdown
        self.data_position = data_position
        self.state = tuple(state)
        self.clock = RoundCounter()
        self.synchronizer: Synchronizer | None = None
        self.trained = trainable(inner(model))  # at the beginning of the run
        self.averaged = {id(parameter) for parameter in self.trained.values()}
        self.first_step = 0
        self.agreed = 0  # changes that had taken effect before this step
        self.ledger = Ledger()
        self.saved_objects: list[Any] | None = None  # state= objects before an interrupted step
        self.in_consensus = False
        self.warns = False  # warn once of layers that make replicas differ under a code
        self.closed = False
        self._store_exchanges = 0  # before this step: saves and transitions
        self._store_exchanges_step = 0
        self._next_loader: RankLoader | None = None  # for the first step of these members

    # Properties

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
    def tree(self) -> TreeExchange | None:
        """The place of this rank in a coded tree; None under other plans."""
        exchange = self.synchronizer.exchange if self.synchronizer is not None else None
        return exchange if isinstance(exchange, TreeExchange) else None

    @property
    def replicas_differ(self) -> bool:
        return self.plan.averages_parameters

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that are present, by parameter name."""
        return {name: p.grad for name, p in self.trained.items() if p.grad is not None}

    @property
    def keeps_own(self) -> bool:
        """True if every rank keeps its own state and place in the data when members change, as
        ranks don't hold equal parameters after the same number of steps."""
        return self.replicas_differ or self.plan.cadence.staleness is not None

    def checkpoint_writer(self) -> int:
        """The rank that writes and reads checkpoints."""
        return self.context.checkpoint_writer(self.plan)

    @property
    def is_checkpoint_writer(self) -> bool:
        return self.rank == self.checkpoint_writer()

    # Members and plans

    def set_members(
        self,
        world: World,
        abort_flag: AbortFlag,
        on_interrupted: Callable[[], None],
        root: int | None = None,
    ) -> None:
        """Use these members from now on; `on_interrupted` is called when one of their steps is
        interrupted. `root` is the rank with the newest parameters, where only one has them."""
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
            # under such a plan a rank that is behind loads another's state
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
            on_interrupted=on_interrupted,
            first_step=self.first_step,
            root=root,
            ledger=self.ledger,
        )

    @contextmanager
    def restricted_to(self, members: tuple[int, ...]) -> Iterator[None]:
        """Inside, only these members take part in collectives."""
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
        """Raise PlanError for a plan that can't run from the next safe point on. The rank that
        proposes a plan calls this, and so does every rank before it switches: any process that
        reaches the store can write a plan there."""
        refuse_what_cannot_run(
            plan, self.group, has_data=self.data_position.rank_loader is not None
        )
        self._refuse_what_does_not_suit(plan)
        lowers = self._protected and not default_catalog().guarantee(plan).protected
        if lowers and self.world.security.encrypted:
            raise PlanError(
                f"{plan} would send over torch's own connections, which are neither authenticated "
                "nor encrypted, in a run whose connections are encrypted",
                "name it in attach() if you trust the network; if you haven't named it at all, "
                "another process writes to the run's store",
            )
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            raise PlanError("a DDP object can't change its plan", "attach the model without DDP")

    def _refuse_what_does_not_suit(self, plan: Plan) -> None:
        """Raise an error if the plan doesn't suit the data, the model or the optimizer."""
        refuse_second_momentum(plan, self.optimizer)
        if is_relayed(plan):
            allocation = allocation_of(plan, self.group)
            refuse_what_differs(self.model, allocation)
            if self.data_position.rank_loader is not None:
                self.data_position.rank_loader.with_allocation(allocation)

    def run_plan(self, kept: PlanState = MappingProxyType({})) -> None:
        """Start the plan with this step; it continues with the state that another one `kept`.
        Residuals that it can't hold are added to the next gradient; under a code, where several
        ranks compute the same, they are dropped."""
        self._refuse_what_does_not_suit(self.plan)
        self.data_position.start_checks()
        self.synchronizer = synchronizer_of(self.context, self.model, self.optimizer, self.plan)
        self.shutdown.is_spare = waits_for_nobody(self.plan) and not self.is_checkpoint_writer
        allocation = self.tree.allocation if self.tree else None
        if self.data_position.rank_loader is not None:
            self._next_loader = self.data_position.rank_loader.with_members(
                self.world.members, allocation
            )
            if self.step >= self.first_step:
                self.begin()
        if self.tree is not None:
            self.warns = self.tree.is_root  # one warning is enough
        self._load_kept(kept)

    def _load_kept(self, kept: PlanState) -> None:
        residuals = self.attached.load_kept(kept) if kept else {}
        if not is_relayed(self.plan):
            parameters = dict(inner(self.model).named_parameters())
            add_to_next_gradient(parameters, residuals, self.group.size)

    def begin(self) -> None:
        """Distribute the data over the members that begin with this step."""
        if self._next_loader is not None:
            self.data_position.rank_loader, self._next_loader = self._next_loader, None

    def switch_plan(self, plan: Plan) -> None:
        """Replace the plan. Replicas that differ under the old plan are made equal first, if the
        new one needs it."""
        self.refuse_what_does_not_run(plan)
        self.attached.wait_and_apply()
        kept = summands(self.attached.kept)
        self.attached.detach()
        if self.replicas_differ and not plan.averages_parameters:
            state = self._optimizer_state()
            self.collectives.all_reduce_mean(p.detach() for p in self.differing)
            self.collectives.all_reduce_mean_of_differing([*_statistics(self.model), *state])
        self._leave_exchange()
        if isinstance(self.synchronizer, AsynchronousSynchronizer):
            self.collectives.broadcast(self.checkpoint_writer(), self._optimizer_state())
            self.ledger = Ledger()
            self.context = replace(self.context, root=None, ledger=self.ledger)
        self.plan = plan
        self.run_plan(kept)

    def _leave_exchange(self) -> None:
        """Leave the server or the tree, when no other rank needs this one there."""
        if isinstance(self.synchronizer, AsynchronousSynchronizer):
            self.synchronizer.leave(self.engine.timeout)
        if self.tree is not None:
            # Ranks that join later have yet to apply this change.
            self.tree.leave(self.engine.timeout, replace(self.snapshot(), changes=self.agreed))
            self.tree.close()

    def restart_plan(self, load: Callable[[], PlanState]) -> None:
        """Run the plan from the step and with the kept state that `load` loads, before the first
        step."""
        before, kept = self.step, load()
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            self._load_kept(kept)  # its hook can't be registered again
        elif self.tree is None or self.step != before:
            self.attached.detach()
            self._leave_exchange()
            self.run_plan(kept)

    # Equal replicas

    @property
    def differing(self) -> list[nn.Parameter]:
        """The parameters in which replicas differ: those that are or were trained."""
        return list(self.trained.values()) if self.replicas_differ else []

    def broadcast_model(self, root: int) -> None:
        """Overwrite all replicas' parameters and buffers with those of `root`."""
        model = self.model
        self.collectives.broadcast(
            root, [*(p.detach() for p in model.parameters()), *model.buffers()]
        )

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
    def averaged_optimizer_state(self) -> Iterator[None]:
        """Inside, the optimizer's state is the mean over all ranks, where it differs."""
        state = self._optimizer_state() if self.replicas_differ else []
        own = [tensor.clone() for tensor in state]
        try:
            self.collectives.all_reduce_mean_of_differing(state)
            yield
        finally:
            for tensor, values in zip(state, own, strict=True):
                tensor.copy_(values)

    def _optimizer_state(self) -> list[torch.Tensor]:
        """The optimizer's tensors, including those that only other ranks had until now."""
        state = optimizer_state_of_all(
            self.optimizer,
            self.world,
            self.abort_flag,
            self.next_store_exchange(),
            self.engine.timeout,
        )
        return list(state.values())

    def next_store_exchange(self) -> int:
        """The number of the next exchange at the store: the same on all ranks that take part, also
        on one that has joined since the last."""
        if self._store_exchanges_step != self.step:
            self._store_exchanges_step, self._store_exchanges = self.step, 0
        self._store_exchanges += 1
        return MAX_BARRIERS_PER_STEP * self.step + self._store_exchanges

    # Snapshots

    def snapshot(self, kept: PlanState = MappingProxyType({})) -> Snapshot:
        """The state of this rank; recipients get `kept` of the plan's state."""
        objects = self.saved_objects  # later changes by the script don't count
        if objects is None:
            objects = [part.state_dict() for part in self.state]
        return Snapshot(
            step=self.step,
            position=self.data_position.position,
            sampling=self.data_position.sampling,
            collectives=self.clock.shared,
            changes=self.agreement.effective_count,
            plan=str(self.plan),
            model=inner(self.model).state_dict(),
            optimizer=self.optimizer.state_dict(),
            objects=objects,
            kept=kept,
        )

    def load_snapshot(self, state: Snapshot) -> None:
        """Continue from the state of another rank."""
        state.load_into(inner(self.model), self.optimizer, self.state)
        self.clock.go_to(state.step)
        self.clock.shared = state.collectives
        self.data_position.jump(state.position, again=state.settings(self.optimizer, self.state))
        self.data_position.stopping = self.data_position.stopping or state.ended
        self.agreement.effective_count = state.changes

    def catch_up(self) -> None:
        """Under a code: load another rank's state if the others are so far ahead that this rank
        can't get their results. Under `asp`: skip the steps that the others took while this rank
        was absent."""
        if self.tree is not None and self.tree.left_behind(self.step):
            self.load_snapshot(self.tree.request_snapshot(after=self.step))
        behind = (
            self.synchronizer.behind
            if isinstance(self.synchronizer, AsynchronousSynchronizer)
            else 0
        )
        if behind:
            log.warning("rank %d was absent: its part of %d steps is dropped", self.rank, behind)
            if self.data_position.rank_loader is not None:
                self.data_position.skip(behind)
            self.clock.go_to(self.step + behind)


def inner(model: nn.Module) -> nn.Module:
    """The model without its DDP wrapper, which checkpoints don't contain."""
    found = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(found, nn.Module)
    return found


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]

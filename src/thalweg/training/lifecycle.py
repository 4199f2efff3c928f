"""One rank's part of a run: the model it trains, the plan it runs, and the members it runs with.

A run starts, resumes, rejoins, changes its members and switches its plan by `enter`, the only way
into "this plan runs among these members from this state". `snapshot` is this rank's state before a
step, and `load_snapshot` continues from another rank's.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from thalweg.catalog import default_catalog
from thalweg.engine.collectives import Collectives, RoundCounter
from thalweg.engine.engine import Engine
from thalweg.errors import Interrupted, PlanError, RunError, StoreLost, UsageError
from thalweg.members.abort import AbortFlag
from thalweg.members.agreement import Agreement
from thalweg.members.world import World
from thalweg.plan import Plan
from thalweg.redundancy import allocation_of, is_relayed
from thalweg.schedules import Group
from thalweg.steps import refuse_what_cannot_run
from thalweg.training.coded_model_check import refuse_what_differs
from thalweg.training.data.loader import RankLoader
from thalweg.training.data.position import DataPosition
from thalweg.training.exchanges.compressed import refuse_second_momentum
from thalweg.training.exchanges.exchange import Exchange
from thalweg.training.factory import make, trainable
from thalweg.training.finite import BadGradients
from thalweg.training.optimizer_state import optimizer_state_of_all
from thalweg.training.plan_context import Ledger, PlanContext
from thalweg.training.plan_state import PlanState, add_to_next_gradient, summands
from thalweg.training.shutdown import Shutdown
from thalweg.training.snapshot import Snapshot, Stateful, load_settings
from thalweg.training.sources.source import Source

log = logging.getLogger("thalweg")
MAX_BARRIERS_PER_STEP = 1000  # exchanges at the store before one step


class RankSession:
    """The state of one rank in a run: `plan` is the one that runs, `source` runs it, `group` are
    the members now, and `first_step` is the first step that they take together."""

    group: Group
    collectives: Collectives
    agreement: Agreement
    context: PlanContext

    def __init__(
        self,
        world: World,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        plan: Plan,
        group: Group,
        engine: Engine,
        shutdown: Shutdown,
        data_position: DataPosition,
        state: Sequence[Stateful],
        notify: Callable[[str, int, str, Any], None],
    ) -> None:
        self.world = world
        self.model = model
        self._optimizer = optimizer
        self._notify = notify
        self.plan = plan
        self._protected = default_catalog().guarantee(plan).protected
        self.everybody = self.group = group
        self.engine = engine
        self.shutdown = shutdown
        self.data_position = data_position
        self.state = tuple(state)
        self.clock = RoundCounter()
        self.source: Source | None = None
        # Called if a rendezvous interrupts a step: True if the source has been opened again.
        self.on_interrupted: Callable[[Interrupted | StoreLost], bool] = _raise
        self.on_entered: Callable[[], None] = lambda: None  # called when other members have begun
        self.trained = trainable(inner(model))  # at the beginning of the run
        self.averaged = {id(parameter) for parameter in self.trained.values()}
        self.first_step = 0
        self.agreed = 0  # changes that had taken effect before this step
        self.ledger = Ledger()
        # State of the state= objects, and the optimizer's settings, before an interrupted step.
        self.saved_objects: list[Any] | None = None
        self._saved_settings: list[dict[str, Any]] = []
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
    def abort_flag(self) -> AbortFlag:
        return self.shutdown.abort_flag

    @property
    def step(self) -> int:
        return self.clock.step

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        self.require_optimizer()
        assert self._optimizer is not None
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def has_optimizer(self) -> bool:
        return self._optimizer is not None

    def require_optimizer(self) -> None:
        """Raise UsageError if the run hasn't begun, since the script has given no optimizer."""
        if self._optimizer is None:
            raise UsageError(
                "the run has no optimizer yet", "set run.optimizer before the first step"
            )

    @property
    def attached(self) -> Source:
        self.require_optimizer()
        if self.source is None or self.closed:
            raise RunError("the run is closed", "attach the model again")
        return self.source

    @property
    def exchange(self) -> Exchange:
        """The exchange of the plan that runs."""
        return Source.exchange if self.source is None else self.source.exchange

    @property
    def replicas_differ(self) -> bool:
        return self.plan.averages_parameters

    @property
    def applies(self) -> bool:
        """False for the rest of a loop iteration whose step was interrupted by a rendezvous."""
        return self.saved_objects is None and not self.exchange.has_diverged

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

    @property
    def is_spare(self) -> bool:
        """True if the others can do without this rank."""
        return not self.exchange.waits_for_all and not self.is_checkpoint_writer

    # Members and plans

    def enter(
        self,
        world: World | None,
        plan: Plan,
        take: Callable[[], tuple[Snapshot | None, PlanState]] = lambda: (None, {}),
        repeating: Source | None = None,
    ) -> Snapshot | None:
        """Run this plan among the members of `world`, or the present ones if None. `take`, which is
        called among these members, returns the snapshot to continue from, None to keep this rank's
        state, and the kept state to continue with. `repeating` is the source that waits for
        the averages of an interrupted step. Returns the snapshot."""
        if world is not None:
            self._use_members(world)
        self.refuse_what_does_not_run(plan)
        self.plan = plan
        snapshot, kept = take()
        if snapshot is not None:
            self.load_snapshot(snapshot)
            missed = self.first_step - self.step
            if missed > 0 and self.keeps_own and self.data_position.rank_loader is not None:
                self.data_position.skip(missed)
                self.clock.go_to(self.first_step)
        if not self.closed:
            self._run_plan(kept, repeating)
            if world is not None:
                self.on_entered()
        return snapshot

    def _use_members(self, world: World) -> None:
        """Use these members from now on."""
        if self.source is not None:
            self.source.abort()
        gc.collect()  # an interrupted step has cycles, and buckets that will be replaced
        self.world, self.shutdown.abort_flag = world, world.abort_flag()
        epoch = world.membership_epoch
        self.group = self.everybody.subgroup(world.members)
        self.first_step = epoch.first_step
        self.clock.go_to(self.step)
        self._store_exchanges = 0
        self._next_loader = None
        self.collectives = Collectives(self.group, self.engine, self.clock)
        self.agreement = Agreement(
            world.store,
            rank=world.rank,
            size=world.size,
            # under such a plan a rank that is behind loads another's state
            awaits=lambda: () if self.exchange.allocation else world.members,
        )
        self.context = PlanContext(
            world=world,
            abort_flag=self.abort_flag,
            group=self.group,
            engine=self.engine,
            clock=self.clock,
            data_position=self.data_position,
            agreement=self.agreement,
            parameters=self.trained,
            bad_gradients=BadGradients(world, self.clock),
            snapshot=self.snapshot,
            on_interrupted=self.on_interrupted,
            first_step=self.first_step,
            root=epoch.root,
            ledger=self.ledger,
            notify=self._notify,
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
        if isinstance(self.model, nn.parallel.DistributedDataParallel) and plan != self.plan:
            raise PlanError("a DDP object can't change its plan", "attach the model without DDP")

    def _refuse_what_does_not_suit(self, plan: Plan) -> None:
        """Raise an error if the plan doesn't suit the data, the model or the optimizer."""
        refuse_second_momentum(plan, self.optimizer)
        if is_relayed(plan):
            allocation = allocation_of(plan, self.group)
            refuse_what_differs(self.model, allocation)
            if self.data_position.rank_loader is not None:
                allocation.refuse_batch(self.data_position.rank_loader.sampler.batch)

    def _run_plan(self, kept: PlanState, repeating: Source | None) -> None:
        """Start the plan with this step; it continues with the state that another one `kept`.
        Residuals that it can't hold are added to the next gradient; under a code, where several
        ranks compute the same, they are dropped."""
        self._refuse_what_does_not_suit(self.plan)
        self.data_position.start_checks()
        self.source = make(self.context, self.model, self.optimizer, self.plan, repeating)
        self.shutdown.is_spare = self.is_spare
        if self.data_position.rank_loader is not None:
            self._next_loader = self.data_position.rank_loader.with_members(
                self.world.members, self.exchange.allocation
            )
            if self.step >= self.first_step:
                self.begin()
        self.warns = self.exchange.warns
        self._load_kept(kept)

    def _load_kept(self, kept: PlanState) -> None:
        residuals = self.attached.load_kept(kept) if kept else {}
        if self.exchange.allocation is None:
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
        if self.plan.cadence.staleness is not None:
            self.collectives.broadcast(self.checkpoint_writer(), self._optimizer_state())
            self.ledger = Ledger()
            self.context = replace(self.context, root=None, ledger=self.ledger)
        self.enter(None, plan, lambda: (None, kept))

    def restart(self, load: Callable[[], PlanState]) -> None:
        """Run the plan from the state that `load` loads, before the first step."""
        before, kept = self.step, load()
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            self._load_kept(kept)  # its hook can't be registered again
        elif self.step != before or self.exchange.waits_for_all:
            self.attached.detach()
            self._leave_exchange()
            self.enter(None, self.plan, lambda: (None, kept))

    def _leave_exchange(self) -> None:
        """Leave the exchange when no other rank needs this one there."""

        def last() -> Snapshot:  # ranks that join a tree later have yet to apply this change
            return replace(self.snapshot(), changes=self.agreed)

        self.exchange.leave(self.engine.timeout, last)
        self.exchange.close()

    def leave(self, seconds: float) -> bool | None:
        """Wait until the ranks that may still need this one have ended too; False after a timeout,
        None if all members leave together."""
        return self.exchange.leave(seconds, self._last_snapshot)

    def _last_snapshot(self) -> Snapshot | None:
        """The state at the end; None if it may be that of half a step."""
        if self.shutdown.failed:
            return None
        self.data_position.leave_epoch()
        self.catch_up()
        return replace(self.snapshot(), ended=True)

    # Interrupted steps

    def void_step(self) -> None:
        """Make the present step of no effect, in what is left of the script's loop iteration."""
        self.saved_objects = deepcopy([part.state_dict() for part in self.state])
        groups = self.optimizer.param_groups
        self._saved_settings = deepcopy([{**group, "params": ()} for group in groups])
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def undo_iteration(self) -> None:
        """Undo what the script has changed since `void_step`: a scheduler, for instance, sets
        the optimizer's learning rate. One that isn't among the `state=` objects isn't undone, and
        then its settings aren't either."""
        saved, self.saved_objects = self.saved_objects, None
        if saved:
            load_settings(self.optimizer, self.state, self._saved_settings, saved)

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
        if not self.exchange.waits_for_all:
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
            self.optimizer, self.world, self.abort_flag, self.next_store_exchange()
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
        objects, optimizer = self.saved_objects, self.optimizer.state_dict()
        if objects:  # later changes by the script don't count
            groups = zip(optimizer["param_groups"], self._saved_settings, strict=True)
            settings = [{**saved, "params": group["params"]} for group, saved in groups]
            optimizer = {**optimizer, "param_groups": settings}
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
            optimizer=optimizer,
            objects=objects,
            kept=kept,
        )

    def load_snapshot(self, state: Snapshot) -> None:
        """Continue from the state of another rank."""
        state.load_into(inner(self.model), self.optimizer, self.state)
        self.clock.go_to(state.step)
        self.clock.shared = state.collectives
        # What scripts change at the end of an epoch, and not the whole snapshot:
        settings = self.state, state.optimizer["param_groups"], state.objects
        self.data_position.jump(
            state.position, again=partial(load_settings, self.optimizer, *settings)
        )
        self.data_position.stopping = self.data_position.stopping or state.ended
        self.agreement.effective_count = state.changes

    def catch_up(self, after: int | None = None) -> None:
        """Follow ranks that don't wait for this one: load the state of one that is past the step
        `after`, or else this step, if results that this rank needs aren't kept any more; skip the
        steps that the others took while this rank was absent."""
        snapshot = self.exchange.missed_snapshot(self.step if after is None else after)
        if snapshot is not None:
            self.load_snapshot(snapshot)
        behind = self.exchange.take_skipped_steps()
        if behind:
            log.warning("rank %d was absent: its part of %d steps is dropped", self.rank, behind)
            if self.data_position.rank_loader is not None:
                self.data_position.skip(behind)
            self.clock.go_to(self.step + behind)


def _raise(error: Interrupted | StoreLost) -> bool:
    raise error


def inner(model: nn.Module) -> nn.Module:
    """The model without its DDP wrapper, which checkpoints don't contain."""
    found = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(found, nn.Module)
    return found


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]

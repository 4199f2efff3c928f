"""The protocol of synchronizers, and the choice of one for a plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thalweg.catalog import default_catalog, parse_plan
from thalweg.compress import arrange
from thalweg.engine.collectives import RoundCounter
from thalweg.engine.engine import Engine
from thalweg.errors import PlanError
from thalweg.members.abort import AbortFlag
from thalweg.members.agreement import Agreement
from thalweg.members.world import World
from thalweg.plan import Plan, What
from thalweg.redundancy import is_relayed, root_of, waits_for_nobody
from thalweg.schedules import Group
from thalweg.training.compressor_state import CompressorState
from thalweg.training.contention_monitor import ContentionMonitor
from thalweg.training.data.position import DataPosition
from thalweg.training.exchanges.compressed import Compression
from thalweg.training.exchanges.native import DdpSynchronizer, NativeSynchronizer
from thalweg.training.exchanges.rounds import RoundsExchange
from thalweg.training.exchanges.server import AsynchronousSynchronizer, Ledger
from thalweg.training.exchanges.tree import CodedSynchronizer
from thalweg.training.finite import BadGradients
from thalweg.training.optimizer_state import averaged_tensors
from thalweg.training.snapshot import Snapshot
from thalweg.training.sources.gradients import SteppedSynchronizer, layout_of
from thalweg.training.sources.parameters import ParameterSynchronizer, TwoLevelSynchronizer
from thalweg.transports import Array

RUNNING_PLAN_KEY = "plan"  # in the store: the plan that runs, and its first step


class Synchronizer(Protocol):
    """Synchronises the replicas of a model under a plan."""

    @property
    def compressor_state(self) -> CompressorState:
        """The state that the compressor keeps from step to step."""

    @property
    def compressor_state_before(self) -> CompressorState:
        """The compressor state before the current step, for the case that it is interrupted."""

    def load_compressor_state(self, state: CompressorState) -> Mapping[str, Array]:
        """Continue with another compressor's state; returns the residuals that can't be held
        here."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward accumulates gradients without averaging them."""

    def after_step(self) -> None:
        """Called after each step of the optimizer."""

    def wait_and_apply(self) -> None:
        """Wait for the transfers under way, and apply their results."""

    def detach(self) -> None:
        """Finish, and remove all hooks from the model."""

    def abort(self) -> None:
        """Detach at once; transfers under way are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """The context in which plans run: one rank in one membership epoch. `snapshot` is its state
    before a step; the exchange calls `on_interrupted` when a rendezvous interrupts a step.
    Parameters are averaged from `first_step` on. `root` is the rank with the newest parameters
    after a rendezvous under `asp`."""

    world: World
    abort_flag: AbortFlag
    group: Group
    engine: Engine
    clock: RoundCounter
    data_position: DataPosition
    agreement: Agreement
    bad_gradients: BadGradients
    snapshot: Callable[[], Snapshot]
    on_interrupted: Callable[[], None]
    first_step: int = 0
    root: int | None = None
    ledger: Ledger = field(default_factory=Ledger)

    def synchronizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan
    ) -> Synchronizer:
        """The synchronizer of a plan that begins with the current step."""
        if self.world.rank == self.checkpoint_writer(plan):  # for ranks that rejoin
            self.world.put(RUNNING_PLAN_KEY, json.dumps([str(plan), self.clock.step]))
        parameters = trainable(model)
        report = self.bad_gradients.report
        native = default_catalog().is_native(plan)
        if isinstance(model, DistributedDataParallel):
            _refuse_for_ddp(plan)
            return DdpSynchronizer(
                model, plan, self.group, self.engine, self.clock, report, native=native
            )
        if native and self.group.size > 1:  # one rank has nothing to average
            self.world.join_process_group()
            return NativeSynchronizer(
                model, plan, self.world.membership, self.on_interrupted, report
            )
        if plan.averages_parameters:
            return self._by_parameters(model, optimizer, plan)
        if is_relayed(plan):
            return self._relayed(parameters, plan)
        if plan.cadence.staleness is not None:
            return AsynchronousSynchronizer(
                parameters,
                optimizer,
                self.world.namespace(f"server/{max(self.clock.step, self.first_step)}"),
                self.abort_flag,
                root=self.checkpoint_writer(plan),
                staleness=plan.cadence.staleness,
                bucket=plan.settings.bucket,
                steps=self.clock.step,
                after_rendezvous=self.root is not None,
                ledger=self.ledger,
                on_interrupted=self.on_interrupted,
            )
        compression = Compression.of(plan)
        arranged = arrange if compression is None else compression.arrange
        layout = layout_of(parameters, plan.settings.bucket, arranged)
        largest = inf if compression is None else compression.compressor.largest
        exchange = RoundsExchange(plan, self.group, layout, self.engine, self.clock, compression)
        return SteppedSynchronizer(
            parameters, layout, exchange, self.on_interrupted, report, largest
        )

    def _by_parameters(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan
    ) -> ParameterSynchronizer:
        namespace = self.world.namespace(f"groups/{self.clock.step}")
        tensors = partial(
            averaged_tensors,
            model,
            optimizer if plan.what is What.EVERYTHING else None,
            namespace,
            self.abort_flag,
        )

        def make_monitor(group: Group, nbytes: int) -> ContentionMonitor:
            return ContentionMonitor(group, namespace, self.agreement, self.engine.arrivals, nbytes)

        two_levels = plan.cadence.two_levels and len(self.group.racks) > 1
        adjusts = plan.topology.arguments.get("adjust") and self.group.size > 1 and not two_levels
        kind = TwoLevelSynchronizer if two_levels else ParameterSynchronizer
        return kind(
            tensors,
            plan,
            self.group,
            self.engine,
            self.clock,
            make_monitor if adjusts else None,
            first_step=self.first_step,
            on_interrupted=self.on_interrupted,
        )

    def _relayed(self, parameters: Mapping[str, nn.Parameter], plan: Plan) -> CodedSynchronizer:
        since = self.clock.step
        return CodedSynchronizer(
            parameters,
            plan,
            self.group,
            self.clock,
            self.world.namespace(f"tree/{since}"),
            self.abort_flag,
            data_position=self.data_position,
            snapshot=self.snapshot,
            on_interrupted=self.on_interrupted,
            report=self.bad_gradients.report,
        )

    def tree_under_way(self) -> tuple[Plan, int] | None:
        """The coded plan that the other ranks run, and its first step; None if their plan has no
        code, or they don't run one yet, as they may be waiting for this rank's former process."""
        found = self.world.wait_for(RUNNING_PLAN_KEY, 0.0, self.abort_flag)
        if found is None:
            return None
        text, since = json.loads(found)
        plan = parse_plan(text)
        return (plan, since) if is_relayed(plan) else None

    def checkpoint_writer(self, plan: Plan) -> int:
        """The rank that writes and reads checkpoints."""
        root = self.root if self.root is not None else root_of(plan, self.group)
        return self.group.ranks[0] if root is None else root


def _refuse_for_ddp(plan: Plan) -> None:
    remedy = "attach the model without DDP"
    if plan.averages_parameters:
        raise PlanError(f"a DDP object averages gradients, and {plan} averages parameters", remedy)
    if waits_for_nobody(plan):
        raise PlanError(f"a DDP object waits for all ranks, and {plan} for none", remedy)


def trainable(model: nn.Module) -> Mapping[str, nn.Parameter]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise PlanError("the model has no parameter that is trained", "unfreeze some")
    return parameters

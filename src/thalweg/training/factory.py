"""The choice of a synchronizer for a plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thalweg.catalog import default_catalog, parse_plan
from thalweg.engine.collectives import RoundCounter
from thalweg.engine.engine import Engine
from thalweg.errors import PlanError
from thalweg.members.abort import AbortFlag
from thalweg.members.agreement import Agreement
from thalweg.members.world import World
from thalweg.plan import Plan, What
from thalweg.redundancy import is_relayed, root_of, waits_for_nobody
from thalweg.schedules import Group
from thalweg.training.contention_monitor import ContentionMonitor
from thalweg.training.data.position import DataPosition
from thalweg.training.exchanges.compressed import Compression
from thalweg.training.exchanges.native import DdpSynchronizer, NativeSynchronizer
from thalweg.training.exchanges.rounds import RoundsExchange
from thalweg.training.exchanges.server import AsynchronousSynchronizer, Ledger
from thalweg.training.exchanges.tree import CodedSynchronizer, TreeExchange
from thalweg.training.finite import BadGradients
from thalweg.training.optimizer_state import averaged_tensors
from thalweg.training.snapshot import Snapshot
from thalweg.training.sources.gradients import GradientSynchronizer, layout_of
from thalweg.training.sources.parameters import ParameterSynchronizer, TwoLevelSynchronizer
from thalweg.training.synchronizer import Synchronizer

RUNNING_PLAN_KEY = "plan"  # in the store: the plan that runs, and its first step


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
        layout = layout_of(parameters, plan.settings.bucket, compression.arrange)
        if is_relayed(plan):
            tree = TreeExchange(
                plan,
                self.group,
                layout,
                self.clock,
                self.world.namespace(f"tree/{self.clock.step}"),
                self.abort_flag,
                self.data_position,
                self.snapshot,
            )
            return CodedSynchronizer(
                parameters, layout, tree, self.on_interrupted, report, compression.largest
            )
        exchange = RoundsExchange(plan, self.group, layout, self.engine, self.clock)
        return GradientSynchronizer(
            parameters, layout, exchange, self.on_interrupted, report, compression.largest
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

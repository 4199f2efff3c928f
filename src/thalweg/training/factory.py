"""What a plan does for a model, and which kind of it a plan needs."""

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

RUNNING_PLAN_KEY = "plan"  # in the store: which one runs, and since when


class Synchronizer(Protocol):
    @property
    def compressor_state(self) -> CompressorState:
        """What the compressor keeps from step to step."""

    @property
    def compressor_state_before(self) -> CompressorState:
        """What it kept before the step that was begun, if that was broken off."""

    def load_compressor_state(self, held: CompressorState) -> Mapping[str, Array]:
        """Go on with what another one held; residuals that it has no place for are returned."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward adds gradients up without averaging them."""

    def after_step(self) -> None:
        """The optimizer has stepped."""

    def wait_and_apply(self) -> None:
        """Wait for what is on its way, and apply it."""

    def detach(self) -> None:
        """Leave the model as if it had never been there."""

    def abort(self) -> None:
        """The same at once, whatever is on its way: it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """Where plans run: this rank among the members of a formation. `snapshot` is what it holds
    before a step; `broken_off` is called when a step was, and its members meet anew. Parameters
    are averaged from the step `begins` on. `root` has the newest parameters of a run under `asp`,
    whose members have met anew."""

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
        """From the clock's step on."""
        if self.world.rank == self.checkpoint_writer(plan):  # one who comes back is to find it
            self.world.put(RUNNING_PLAN_KEY, json.dumps([str(plan), self.clock.step]))
        parameters = trainable(model)
        tell = self.bad_gradients.report
        native = default_catalog().is_native(plan)
        if isinstance(model, DistributedDataParallel):
            _refuse_for_ddp(plan)
            return DdpSynchronizer(
                model, plan, self.group, self.engine, self.clock, tell, native=native
            )
        if native and self.group.size > 1:  # alone there is nothing to average
            self.world.join_process_group()
            return NativeSynchronizer(model, plan, self.world.membership, self.on_interrupted, tell)
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
                anew=self.root is not None,
                ledger=self.ledger,
                broken_off=self.on_interrupted,
            )
        compression = Compression.of(plan)
        arranged = arrange if compression is None else compression.arrange
        layout = layout_of(parameters, plan.settings.bucket, arranged)
        largest = inf if compression is None else compression.compressor.largest
        exchange = RoundsExchange(plan, self.group, layout, self.engine, self.clock, compression)
        return SteppedSynchronizer(parameters, layout, exchange, self.on_interrupted, tell, largest)

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

        def watch(group: Group, nbytes: int) -> ContentionMonitor:
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
            watch if adjusts else None,
            begins=self.first_step,
            broken_off=self.on_interrupted,
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
            broken_off=self.on_interrupted,
            tell=self.bad_gradients.report,
        )

    def tree_under_way(self) -> tuple[Plan, int] | None:
        """The coded plan that the others run, and since which step; None if it has no code, or
        they don't run one yet: they may be waiting for what this rank was before it died."""
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
    remedy = "attach the model without DDP round it"
    if plan.averages_parameters:
        raise PlanError(f"a DDP object averages gradients, and {plan} parameters", remedy)
    if waits_for_nobody(plan):
        raise PlanError(f"a DDP object waits for everybody, and {plan} for nobody", remedy)


def trainable(model: nn.Module) -> Mapping[str, nn.Parameter]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise PlanError("the model has no parameter that is trained", "unfreeze some")
    return parameters

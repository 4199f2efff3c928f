"""The choice of a synchronizer for a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thalweg.catalog import default_catalog
from thalweg.errors import PlanError
from thalweg.plan import Plan
from thalweg.redundancy import is_relayed, waits_for_nobody
from thalweg.training.exchanges.compressed import Compression
from thalweg.training.exchanges.native import DdpSynchronizer, NativeSynchronizer
from thalweg.training.exchanges.rounds import RoundsExchange
from thalweg.training.exchanges.server import AsynchronousSynchronizer
from thalweg.training.exchanges.tree import TreeExchange
from thalweg.training.plan_context import RUNNING_PLAN_KEY, PlanContext
from thalweg.training.sources.gradients import GradientSynchronizer, layout_of
from thalweg.training.sources.parameters import ParameterSynchronizer, TwoLevelSynchronizer
from thalweg.training.synchronizer import Synchronizer


def synchronizer_of(
    context: PlanContext, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan
) -> Synchronizer:
    """The synchronizer of a plan that begins with the current step."""
    world, step = context.world, context.clock.step
    if world.rank == context.checkpoint_writer(plan):  # for ranks that rejoin
        world.put(RUNNING_PLAN_KEY, json.dumps([str(plan), step]))
    parameters = trainable(model)
    native = default_catalog().is_native(plan)
    if isinstance(model, DistributedDataParallel):
        _refuse_for_ddp(plan)
        return DdpSynchronizer(context, model, plan, native=native)
    if native and context.group.size > 1:  # one rank has nothing to average
        world.join_process_group()
        return NativeSynchronizer(context, model, plan)
    if plan.averages_parameters:
        two_levels = plan.cadence.two_levels and len(context.group.racks) > 1
        kind = TwoLevelSynchronizer if two_levels else ParameterSynchronizer
        return kind(context, model, optimizer, plan)
    if plan.cadence.staleness is not None:
        return AsynchronousSynchronizer(context, parameters, optimizer, plan)
    compression = Compression.of(plan)
    layout = layout_of(parameters, plan.settings.bucket, compression.arrange)
    exchange = (TreeExchange if is_relayed(plan) else RoundsExchange)(context, plan, layout)
    return GradientSynchronizer(context, parameters, layout, exchange, compression.largest)


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

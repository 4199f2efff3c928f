"""The choice of source and exchange for a plan: the only place that looks at a plan's kind."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thalweg.catalog import default_catalog, parse_plan
from thalweg.errors import LayoutError, PlanError
from thalweg.plan import Plan
from thalweg.redundancy import allocation_of, is_relayed, waits_for_nobody
from thalweg.schedules import Group
from thalweg.training.auto.request import with_settings
from thalweg.training.exchanges.compressed import Compression
from thalweg.training.exchanges.exchange import Exchange
from thalweg.training.exchanges.rounds import RoundsExchange
from thalweg.training.exchanges.server import ServerExchange
from thalweg.training.exchanges.tree import TreeExchange
from thalweg.training.plan_context import PlanContext
from thalweg.training.sources.ddp_object import DdpSource
from thalweg.training.sources.gradients import GradientSource, layout_of
from thalweg.training.sources.native import NativeSource
from thalweg.training.sources.parameters import ParameterSource, TwoLevelSource
from thalweg.training.sources.source import Source

PARAMETER_SOURCES = {"parameters": ParameterSource}  # by the name of what a plan averages


def make(
    context: PlanContext,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    repeating: Source | None = None,
) -> Source:
    """The source of a plan with its exchange, which begin with the current step. `repeating` is the
    source that waits for the averages of an interrupted step: it is opened again."""
    context.publish_plan(plan)
    parameters = context.parameters
    native = default_catalog().is_native(plan)
    if isinstance(model, DistributedDataParallel):
        _refuse_for_ddp(plan)
        return DdpSource(context, model, plan, native=native)
    if native and context.group.size > 1:  # one rank has nothing to average
        context.world.join_process_group()
        return NativeSource(context, model, plan)
    if plan.averages_parameters:
        two_levels = plan.cadence.two_levels and len(context.group.racks) > 1
        kind = TwoLevelSource if two_levels else PARAMETER_SOURCES[plan.what.name]
        return kind(context, model, optimizer, plan)
    compression = Compression.of(plan)
    layout = layout_of(parameters, plan.settings.bucket, compression.arrange)
    exchange: Exchange
    if plan.cadence.staleness is not None:
        exchange = ServerExchange(context, plan, layout, parameters, optimizer)
    elif is_relayed(plan):
        exchange = TreeExchange(context, plan, layout)
    else:
        exchange = RoundsExchange(context, plan, layout)
    if isinstance(repeating, GradientSource):
        repeating.open(context, layout, exchange)
        return repeating
    return GradientSource(context, parameters, layout, exchange, compression.largest)


def fitting(plan: Plan, group: Group) -> Plan:
    """The plan that these members can run: a code needs more than one worker, and torch's process
    group can't lose any."""
    if default_catalog().is_native(plan):
        return with_settings(parse_plan("ring"), plan)
    if is_relayed(plan):
        try:
            allocation_of(plan, group)
        except LayoutError:
            return with_settings(parse_plan("ring"), plan)
    return plan


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

"""What a plan does for a model, and which kind of it a plan needs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thalweg.catalog import default_catalog
from thalweg.errors import PlanError
from thalweg.facts import Size, Workload
from thalweg.plan import Plan, What
from thalweg.rounds import compile_rounds
from thalweg.runtime import Engine, World
from thalweg.schedules import Group
from thalweg.training.batches import is_coded
from thalweg.training.gradients import GradientAverager
from thalweg.training.itinerary import Clock
from thalweg.training.native import DdpAdapter, NativeAverager
from thalweg.training.parameters import ParameterAverager

ANY_WORKLOAD = Workload.of_size(Size.parse("4KB"))


class Averager(Protocol):
    def no_sync(self) -> AbstractContextManager[None]:
        """Backward adds gradients up without averaging them."""

    def after_step(self) -> None:
        """The optimizer has stepped."""

    def settle(self) -> None:
        """Wait for what is on its way, and apply it."""

    def detach(self) -> None:
        """Leave the model as if it had never been there."""


def averager_for(
    model: nn.Module, plan: Plan, group: Group, engine: Engine, clock: Clock, world: World
) -> Averager:
    parameters = trainable(model)
    native = is_native(plan)
    if isinstance(model, DistributedDataParallel):
        if plan.what is What.PARAMETERS:
            raise PlanError(
                f"a DDP object averages gradients, and {plan} parameters",
                "attach the model without DDP round it",
            )
        return DdpAdapter(model, plan, group, engine, clock, native=native)
    if native and world.size > 1:  # alone there is nothing to average, nor perhaps a network
        world.join_process_group()
        return NativeAverager(model, plan)
    kind = ParameterAverager if plan.what is What.PARAMETERS else GradientAverager
    return kind(parameters, plan, group, engine, clock)


def trainable(model: nn.Module) -> Mapping[str, nn.Parameter]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise PlanError("the model has no parameter that is trained", "unfreeze some")
    return parameters


def is_native(plan: Plan) -> bool:
    return default_catalog().topologies[plan.topology.name].backend


def refuse_what_does_not_run_yet(plan: Plan) -> None:
    if plan.precision is not None:
        raise PlanError(
            f"{plan} compresses, which this version doesn't run",
            "leave +" + plan.precision.name + " out",
        )


def refuse_what_cannot_run(plan: Plan, group: Group, *, has_data: bool) -> None:
    """Plans that this version doesn't run, or not here: said before anything moves."""
    refuse_what_does_not_run_yet(plan)
    compile_rounds(plan, group, ANY_WORKLOAD, 0)
    if is_coded(plan) and not has_data:
        raise PlanError(
            f"{plan} gives each worker several blocks of the data, which your loader can't",
            "give data= and batch= to attach()",
        )

"""The tensors that an optimizer keeps for each parameter, in an order that all ranks share.

Replicas that went their own ways may not even have the same ones: a parameter that one rank never
used has no momentum there. What a rank lacks is zero, as if it had been there from the start.
"""

from __future__ import annotations

import json

import torch
from torch import nn

from thalweg.errors import RunError
from thalweg.runtime import Alarm, World
from thalweg.training.finite import not_finite

STATISTICS = ("running_mean", "running_var")
MEANS_OF_SQUARES = {"running_var", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum"}
Kinds = dict[str, tuple[list[int], str]]  # shape and type by place


def averaged_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, world: World, alarm: Alarm
) -> dict[str, torch.Tensor]:
    """What a parameter plan averages, by name: the trained parameters, batch norm's statistics, and
    this optimizer's slots."""
    tensors = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    for prefix, module in model.named_modules():
        for name in STATISTICS:
            values = getattr(module, name, None)
            is_new = all(values is not other for other in tensors.values())  # modules may share it
            if is_new and isinstance(values, torch.Tensor) and values.is_floating_point():
                tensors[f"{prefix}.{name}"] = values
    if optimizer is not None:
        slots = slots_of_all(optimizer, world, alarm, 0, world.timeout)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if not slots and not_finite(gradients):
            raise RunError(
                "all ranks skipped their first step, so that the optimizer has no state to average",
                "give a GradScaler a smaller init_scale, or leave out optimizer=averaged",
            )
        tensors |= {f"optimizer/{place}": slot for place, slot in slots.items()}
    return tensors


def never_negative(name: str) -> bool:
    """Whether it is a mean of squares: a difference that is added late must not change that."""
    return name.rpartition("/")[2].rpartition(".")[2] in MEANS_OF_SQUARES


def slots_of_all(
    optimizer: torch.optim.Optimizer, world: World, alarm: Alarm, number: int, timeout: float
) -> dict[str, torch.Tensor]:
    """This rank's floating-point slots by place, those included that only other ranks had until
    now; for the `number`-th meeting of all ranks."""
    own = _slots(optimizer)
    kinds: Kinds = {
        place: (list(slot.shape), str(slot.dtype).removeprefix("torch."))
        for place, slot in own.items()
    }
    world.put(f"slots/{number}/{world.rank}", json.dumps(kinds))
    for rank in world.members:
        found = world.wait_for(f"slots/{number}/{rank}", timeout, alarm)
        if found is None:
            raise RunError(
                f"rank {rank} hasn't come to the change of plan within {timeout:g} s",
                "look at what it does there, or allow more time with timeout=",
            )
        kinds |= json.loads(found)
    return {place: _slot(optimizer, place, *kinds[place]) for place in sorted(kinds)}


def _slots(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{i}/{j}/{key}": value
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def _slot(
    optimizer: torch.optim.Optimizer, place: str, shape: list[int], dtype: str
) -> torch.Tensor:
    i, j, key = place.split("/", 2)
    parameter = optimizer.param_groups[int(i)]["params"][int(j)]
    state = optimizer.state[parameter]
    if not isinstance(state.get(key), torch.Tensor):
        state[key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=parameter.device)
    slot: torch.Tensor = state[key]
    return slot

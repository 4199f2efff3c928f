"""The tensors that an optimizer keeps for each parameter, in an order that all ranks share.

Replicas that differ may not even have the same tensors: a parameter that one rank never used has no
momentum there. A tensor that a rank lacks is zero, as it was at the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import nn

from thalweg.errors import RunError
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.training.state_encoding import kinds_of

OPTIMIZER_PREFIX = "optimizer/"  # of the names of optimizer state
STATISTICS_BUFFERS = ("running_mean", "running_var")
MEANS_OF_SQUARES = {"running_var", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum"}


def averaged_tensors(
    parameters: Mapping[str, nn.Parameter],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    world: World,
    abort_flag: AbortFlag,
    step: int,
) -> dict[str, torch.Tensor]:
    """The tensors that a parameter plan averages from this step on, by name: the trained
    parameters, batch norm's statistics, and the state of `optimizer`."""
    tensors: dict[str, torch.Tensor] = {**parameters, **statistics_of(model)}
    if optimizer is not None:
        state = optimizer_state_of_all(optimizer, world, abort_flag, step)
        tensors |= {f"{OPTIMIZER_PREFIX}{key}": tensor for key, tensor in state.items()}
    return tensors


def statistics_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The running statistics of a model's batch norms, by name."""
    statistics: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name in STATISTICS_BUFFERS:
            values = getattr(module, name, None)
            # Modules may share statistics.
            is_new = all(values is not other for other in statistics.values())
            if is_new and isinstance(values, torch.Tensor) and values.is_floating_point():
                statistics[f"{prefix}.{name}"] = values
    return statistics


def has_new_optimizer_state(
    optimizer: torch.optim.Optimizer, averaged: Mapping[str, torch.Tensor]
) -> bool:
    """True if the optimizer has state that is not among the averaged tensors."""
    own = _state(optimizer).items()
    return any(averaged.get(f"{OPTIMIZER_PREFIX}{key}") is not tensor for key, tensor in own)


def never_negative(name: str) -> bool:
    """True if this tensor is a mean of squares, which a delayed correction must not make
    negative."""
    return name.rpartition("/")[2].rpartition(".")[2] in MEANS_OF_SQUARES


def optimizer_state_of_all(
    optimizer: torch.optim.Optimizer, world: World, abort_flag: AbortFlag, number: int
) -> dict[str, torch.Tensor]:
    """The floating-point state of this rank by key, with tensors that only other ranks had until
    now; `number` is that of this exchange between all ranks."""

    def late(rank: int) -> RunError:
        return RunError(
            f"rank {rank} hasn't taken part in the change of plan within {world.timeout:g} s",
            "look at the output of that rank, or allow more time with timeout=",
        )

    kinds = kinds_of(_state(optimizer))
    world.put(f"slots/{number}/{world.rank}", json.dumps(kinds))
    for text in world.read_all(f"slots/{number}", abort_flag, late).values():
        kinds |= json.loads(text)
    return {key: _tensor(optimizer, key, *kinds[key]) for key in sorted(kinds)}


def _state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{i}/{j}/{key}": value
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def _tensor(
    optimizer: torch.optim.Optimizer, path: str, shape: list[int], dtype: str
) -> torch.Tensor:
    i, j, key = path.split("/", 2)
    parameter = optimizer.param_groups[int(i)]["params"][int(j)]
    state = optimizer.state[parameter]
    if not isinstance(state.get(key), torch.Tensor):
        state[key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=parameter.device)
    tensor: torch.Tensor = state[key]
    return tensor

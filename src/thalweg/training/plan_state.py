"""State that a plan keeps from step to step, and its transfer when something changes.

It is stored by kind, then by parameter: residuals, velocities, factors, residuals of votes. Its
holder declares how each kind combines over the ranks (`compress.kept`). A run that resumes
unchanged continues with all of it. When other ranks join or leave, a rank keeps its summands and
what is equal on all ranks; another plan, another layout of the buckets or another number of ranks
gets the summands only, and what a rank has of its own is lost. A residual is never lost: it becomes
a summand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from thalweg.compress import RESIDUAL_KIND, Combine, Kept
from thalweg.transports import Array

if TYPE_CHECKING:
    from thalweg.training.exchanges.compressed import CompressedBucket

ARRAYS_FIELD, COMBINE_FIELD = "compression", "combine"  # of packed state
# The declarations of kinds in checkpoints that have none; all other kinds are equal on all ranks.
UNDECLARED_KINDS = {
    RESIDUAL_KIND: (Combine.SUM, True),
    "velocity": (Combine.SUM, False),
    "vote": (Combine.OWN, True),
}
PlanState = Mapping[str, Kept]
"""State that a plan keeps from step to step, by kind."""


def state_of(buckets: Iterable[CompressedBucket]) -> dict[str, Kept]:
    """The state of all buckets between steps, as views."""
    state: dict[str, Kept] = {}
    for bucket in buckets:
        for kind, kept in bucket.state.items():
            state.setdefault(kind, replace(kept, arrays={})).arrays.update(kept.arrays)
    return state


def restore_state(state: PlanState, to: Iterable[CompressedBucket]) -> dict[str, Array]:
    """Write the state of other buckets into these; returns the residuals that none of them can
    hold."""
    buckets = list(to)
    places = state_of(buckets)
    for kind in state.keys() & places.keys():
        for name, place in places[kind].arrays.items():
            array = state[kind].arrays.get(name)
            if array is not None and place.shape == array.shape:
                place[:] = array
    for bucket in buckets:
        bucket.has_more = True
    taken = {name for kept in places.values() if kept.residual for name in kept.arrays}
    return {name: array for name, array in residuals_in(state).items() if name not in taken}


def residuals_in(state: PlanState) -> dict[str, Array]:
    """The whole residual of each parameter on this rank."""
    residuals: dict[str, Array] = {}
    for kept in state.values():
        for name, array in kept.arrays.items() if kept.residual else ():
            residuals[name] = residuals[name] + array if name in residuals else array
    return residuals


def summands(state: PlanState) -> dict[str, Kept]:
    """The state that may go to another plan, layout or number of ranks: that whose sum over the
    ranks counts."""
    parts = {kind: kept for kind, kept in state.items() if kept.combine is Combine.SUM}
    if residuals := residuals_in(state):
        whole = Kept(combine=Combine.SUM, arrays=residuals, residual=True)
        parts = {kind: kept for kind, kept in parts.items() if not kept.residual}
        parts[RESIDUAL_KIND] = whole
    return parts


def equal_state(state: PlanState) -> dict[str, Kept]:
    """The state that is equal on all ranks."""
    return {kind: kept for kind, kept in state.items() if kept.combine is Combine.EQUAL}


def after_member_change(state: PlanState) -> dict[str, Kept]:
    """The state that a rank keeps when other ranks join or leave."""
    return {**summands(state), **equal_state(state)}


def redistributed(states: Sequence[PlanState], ranks: int) -> dict[str, Kept]:
    """The state of each of `ranks` ranks such that the sums over all ranks stay the same."""
    parts = [summands(state) for state in states]
    return {
        kind: replace(
            kept,
            arrays={
                name: np.sum([part[kind].arrays[name] for part in parts], axis=0)
                / np.float32(ranks)
                for name in kept.arrays
            },
        )
        for kind, kept in parts[0].items()
    }


def tensors_in(state: PlanState) -> list[torch.Tensor]:
    """The arrays as tensors that share their memory, in an order that all ranks share."""
    return [torch.from_numpy(array) for kept in state.values() for array in kept.arrays.values()]


def with_tensors(state: PlanState, tensors: Iterable[torch.Tensor]) -> dict[str, Kept]:
    """State of the same kinds and parameters, with the values of these tensors."""
    values = iter(tensors)
    return {
        kind: replace(kept, arrays={name: next(values).numpy() for name in kept.arrays})
        for kind, kept in state.items()
    }


def packed(state: PlanState) -> dict[str, Any]:
    """The state as plain containers and tensors, which share its memory."""
    return {
        ARRAYS_FIELD: {
            kind: {name: torch.from_numpy(array) for name, array in kept.arrays.items()}
            for kind, kept in state.items()
        },
        COMBINE_FIELD: {kind: [kept.combine.value, kept.residual] for kind, kept in state.items()},
    }


def unpacked(fields: Mapping[str, Any]) -> dict[str, Kept]:
    """The state that `packed` made, or an earlier version, which didn't declare how it
    combines."""
    state = {}
    declared = fields.get(COMBINE_FIELD, {})
    for kind, tensors in fields.get(ARRAYS_FIELD, {}).items():
        combine, residual = declared.get(kind) or UNDECLARED_KINDS.get(kind, (Combine.EQUAL, False))
        arrays = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
        state[kind] = Kept(combine=Combine(combine), arrays=arrays, residual=residual)
    return state


def add_to_next_gradient(
    parameters: Mapping[str, nn.Parameter], residuals: Mapping[str, Array], ranks: int
) -> None:
    """Add residuals that the next plan can't hold to the next gradient of each parameter, once.
    Residuals are those of gradients divided by the number of ranks."""
    for name, residual in residuals.items():
        if name in parameters and residual.any():
            parameter = parameters[name]
            amount = torch.from_numpy(residual * ranks).view(parameter.shape)
            _add_once(parameter, amount.to(parameter.device, parameter.dtype))


def _add_once(parameter: nn.Parameter, amount: torch.Tensor) -> None:
    register: Callable[[Any], Any] = parameter.register_hook

    def add(gradient: torch.Tensor) -> torch.Tensor:
        hook.remove()
        return gradient + amount

    requires_gradient = parameter.requires_grad
    parameter.requires_grad_(True)  # a frozen one takes no hook
    hook = register(add)
    parameter.requires_grad_(requires_gradient)

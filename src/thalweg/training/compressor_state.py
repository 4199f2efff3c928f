"""Compressor state that is kept from step to step, and its transfer when something changes.

State is stored by kind, then by parameter: residuals, velocities, factors, residuals of votes. A
run that resumes unchanged continues with all of it. Another plan, another layout of the buckets or
another number of ranks gets only state whose sum over the ranks counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from thalweg.transports import Array

if TYPE_CHECKING:
    from thalweg.training.exchanges.compressed import CompressedBucket

RESIDUAL = "residual"  # beside the codec's own state
SUMMED_STATE_KINDS = (RESIDUAL, "velocity")  # each rank holds a summand
VOTE = "vote"  # residuals of a vote, of which each rank holds some elements
CompressorState = Mapping[str, Mapping[str, Array]]
"""State that is kept from step to step: by kind, then by parameter."""


def state_views(buckets: Iterable[CompressedBucket]) -> dict[str, dict[str, Array]]:
    """The state of all buckets between steps, by kind, then by parameter."""
    state: dict[str, dict[str, Array]] = {}
    for bucket in buckets:
        for kind, arrays in bucket.state.items():
            state.setdefault(kind, {}).update(arrays)
    return state


def restore_state(state: CompressorState, to: Iterable[CompressedBucket]) -> dict[str, Array]:
    """Write the state of other buckets into these; returns the residuals that none of them can
    hold."""
    buckets = list(to)
    places = state_views(buckets)
    for kind, arrays in state.items():
        for name, array in arrays.items():
            place = places.get(kind, {}).get(name)
            if place is not None and place.shape == array.shape:
                place[:] = array
    for bucket in buckets:
        bucket.has_more = True
    taken = places.get(RESIDUAL, {})
    return {name: array for name, array in total_residuals(state).items() if name not in taken}


def total_residuals(state: CompressorState) -> dict[str, Array]:
    """The whole residual of each parameter, of this rank and of its votes."""
    votes = state.get(VOTE, {})
    return {
        name: residual + votes[name] if name in votes else residual
        for name, residual in state.get(RESIDUAL, {}).items()
    }


def summable_state(state: CompressorState) -> dict[str, Mapping[str, Array]]:
    """The state that may go to another plan, layout or number of ranks. Votes and factors depend on
    the voters, or must be equal on all ranks, and start from zero."""
    whole = {**state, RESIDUAL: total_residuals(state)}
    return {kind: whole[kind] for kind in SUMMED_STATE_KINDS if kind in state}


def state_after_member_change(state: CompressorState) -> dict[str, Mapping[str, Array]]:
    """The state that a rank keeps when other ranks join or leave: its summands, and the part that
    is equal on all ranks."""
    return {**summable_state(state), **replicated_state(state)}


def replicated_state(state: CompressorState) -> dict[str, Mapping[str, Array]]:
    """The state that is equal on all ranks, such as factors."""
    return {k: arrays for k, arrays in state.items() if k not in (*SUMMED_STATE_KINDS, VOTE)}


def redistribute(states: Sequence[CompressorState], ranks: int) -> dict[str, dict[str, Array]]:
    """The state of each of `ranks` ranks such that the sums over all ranks stay the same."""
    parts = [summable_state(state) for state in states]
    return {
        kind: {
            name: np.sum([part[kind][name] for part in parts], axis=0) / np.float32(ranks)
            for name in arrays
        }
        for kind, arrays in parts[0].items()
    }


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

    hook = register(add)

"""What compressors keep from step to step, and where it goes when something changes.

By kind, then by parameter: residuals, velocities, factors, what votes left out. Resumed as it was,
a run goes on with all of it. To another plan, another layout of the buckets or another number of
ranks go only parts that add up over the ranks to something that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from thalweg.transports import Array

RESIDUAL = "residual"  # beside the codec's own slots
SUMMED_STATE_KINDS = (
    RESIDUAL,
    "velocity",
)  # kinds of which every rank holds a part of the sum that counts
VOTE = "vote"  # what a vote left out, of which every rank holds some places
CompressorState = Mapping[str, Mapping[str, Array]]
"""What is kept from step to step: by kind, then by parameter."""


class StatefulBucket(Protocol):
    """A bucket, as far as it keeps something."""

    has_more: bool  # than it left out itself

    @property
    def state(self) -> CompressorState:
        """Windows into it, to be read and written between two steps."""


class Stateless:
    """For averagers whose compressor, if they have one, leaves nothing out."""

    @property
    def compressor_state(self) -> CompressorState:
        return {}

    @property
    def compressor_state_before(self) -> CompressorState:
        return {}

    def load_compressor_state(self, held: CompressorState) -> Mapping[str, Array]:
        return held.get(RESIDUAL, {})


def state_views(buckets: Iterable[StatefulBucket]) -> dict[str, dict[str, Array]]:
    """What all buckets hold between steps, by kind, then by parameter."""
    found: dict[str, dict[str, Array]] = {}
    for bucket in buckets:
        for kind, arrays in bucket.state.items():
            found.setdefault(kind, {}).update(arrays)
    return found


def restore_state(held: CompressorState, to: Iterable[StatefulBucket]) -> dict[str, Array]:
    """Give these buckets what others held; residuals that none of them has a place for."""
    buckets = list(to)
    places = state_views(buckets)
    for kind, arrays in held.items():
        for name, array in arrays.items():
            place = places.get(kind, {}).get(name)
            if place is not None and place.shape == array.shape:
                place[:] = array
    for bucket in buckets:
        bucket.has_more = True
    taken = places.get(RESIDUAL, {})
    return {name: array for name, array in total_residuals(held).items() if name not in taken}


def total_residuals(held: CompressorState) -> dict[str, Array]:
    """All that was left out of each parameter, by this rank and by its votes."""
    votes = held.get(VOTE, {})
    return {
        name: residual + votes[name] if name in votes else residual
        for name, residual in held.get(RESIDUAL, {}).items()
    }


def summable_state(held: CompressorState) -> dict[str, Mapping[str, Array]]:
    """What may go to another plan, layout or number of ranks. Votes and factors belong to who
    voted on what, or must be equal on all ranks, and start anew."""
    whole = {**held, RESIDUAL: total_residuals(held)}
    return {kind: whole[kind] for kind in SUMMED_STATE_KINDS if kind in held}


def state_after_member_change(held: CompressorState) -> dict[str, Mapping[str, Array]]:
    """What a rank keeps when other ranks come or go: its parts, and what is equal on all."""
    return {**summable_state(held), **replicated_state(held)}


def replicated_state(held: CompressorState) -> dict[str, Mapping[str, Array]]:
    """What is equal on all ranks, as factors are."""
    return {
        kind: arrays for kind, arrays in held.items() if kind not in (*SUMMED_STATE_KINDS, VOTE)
    }


def redistribute(held: Sequence[CompressorState], ranks: int) -> dict[str, dict[str, Array]]:
    """What each of so many ranks is to hold, of what all ranks of a run held, so that the sums
    stay the same."""
    parts = [summable_state(one) for one in held]
    return {
        kind: {
            name: np.sum([one[kind][name] for one in parts], axis=0) / np.float32(ranks)
            for name in arrays
        }
        for kind, arrays in parts[0].items()
    }


def add_to_next_gradient(
    parameters: Mapping[str, nn.Parameter], residuals: Mapping[str, Array], ranks: int
) -> None:
    """What a compressor left out and the next plan has no place for is added to the next gradient:
    once, in the next backward that comes to a parameter. Residuals are those of gradients divided
    by the number of ranks."""
    for name, residual in residuals.items():
        if name in parameters and residual.any():
            parameter = parameters[name]
            amount = torch.from_numpy(residual * ranks).view(parameter.shape)
            _PendingResidual(parameter, amount.to(parameter.device, parameter.dtype))


class _PendingResidual:
    def __init__(self, parameter: nn.Parameter, amount: torch.Tensor) -> None:
        register: Callable[[Any], Any] = parameter.register_hook
        self._hook = register(partial(self._pay, amount))

    def _pay(self, amount: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        self._hook.remove()
        return gradient + amount

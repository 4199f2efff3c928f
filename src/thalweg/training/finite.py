"""Gradients that have inf or nan in them: found on the rank that computed them, told to all ranks.

One sum of a bucket, or one norm of all gradients, says whether every element is finite; which
parameter is at fault is looked up only if it is not. Plans that add gradients up send a flag along
with them, torch's own collectives spread the nan itself: either way all ranks know at the same
step. Names are put into the store before the gradients are sent, and are read only in such a step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf, isfinite

import torch
from torch.nn.utils import get_total_norm

from thalweg.engine.collectives import RoundCounter
from thalweg.errors import NotFinite, RunError, ranks_text
from thalweg.members.world import World
from thalweg.transports.store_client import Store

ReportedNames = Mapping[int, Sequence[str]]  # parameters by rank


def is_finite(values: torch.Tensor, largest: float = inf) -> bool:
    """Whether the sum of these values is, or none is beyond `largest`. A sum that overflows needs a
    second look."""
    if largest < inf:
        return bool(torch.stack(values.aminmax()).abs().max() <= largest)
    return isfinite(values.sum(dtype=torch.float32 if values.itemsize == 2 else None).item())


def not_finite(tensors: Mapping[str, torch.Tensor], largest: float = inf) -> list[str]:
    """The names of those that have inf or nan in them, or an element beyond `largest`."""
    values = {n: t._values() if t.is_sparse else t for n, t in tensors.items() if t.numel()}
    if largest == inf and isfinite(get_total_norm(values.values()).item()):
        return []
    ends = {name: torch.stack(tensor.aminmax()).double().abs() for name, tensor in values.items()}
    return [name for name, both in ends.items() if not (both.isfinite() & (both <= largest)).all()]


class BadGradients:
    """Whose gradients were not finite, as the members of a formation tell each other."""

    def __init__(self, world: World, clock: RoundCounter) -> None:
        self._world = world
        self._clock = clock
        self._own: dict[int, list[str]] = {}  # of two steps, since another rank may be one behind

    def report(self, names: Sequence[str]) -> None:
        """This rank's gradients of these parameters are not finite at this step."""
        self._own.setdefault(self._clock.step, []).extend(names)
        self._own = dict(sorted(self._own.items())[-2:])
        with suppress(RunError):  # without the store others learn that it happened, not where
            self._world.put(_key(self._world.rank), json.dumps(self._own))

    def reports(self) -> ReportedNames:
        """What the members have told of this step."""

        def look(store: Store) -> dict[int, bytes]:
            keys = {rank: _key(rank) for rank in self._world.members}
            return {rank: store.get(key) for rank, key in keys.items() if store.check([key])}

        with suppress(RunError):
            found = {
                rank: json.loads(text) for rank, text in self._world.store_client.call(look).items()
            }
            step = str(self._clock.step)
            return {rank: steps[step] for rank, steps in found.items() if step in steps}
        return {}

    def error(self, told: ReportedNames, names: Sequence[str]) -> NotFinite:
        """What this step ends in. These are the names of averages, if no rank has told."""
        who = f"on {ranks_text(sorted(told))}" if told else "on a rank that is not known"
        listed = dict.fromkeys(name for rank in sorted(told) for name in told[rank])
        found = list(listed) or names or ["some parameter"]
        return NotFinite(found, f" {who} at step {self._clock.step}")


def _key(rank: int) -> str:
    return f"nonfinite/{rank}"

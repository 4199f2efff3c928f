"""Gradients with inf or nan: detected on the rank that computed them, and reported to all ranks.

One sum of a bucket, or one norm of all gradients, shows whether every element is finite; the
parameters at fault are looked up only if it is not. Plans that sum gradients send a flag along with
them, and torch's own collectives spread the nan itself: either way all ranks know at the same step.
Names are put into the store before the gradients are sent, and are read only in such a step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf, isfinite

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.utils import get_total_norm

from thalweg.engine.collectives import RoundCounter
from thalweg.errors import NotFinite, RunError, ranks_text
from thalweg.members.world import World
from thalweg.transports.store_client import Store

ReportedNames = Mapping[int, Sequence[str]]  # parameters by rank


def is_finite(values: torch.Tensor, largest: float = inf) -> bool:
    """True if the sum of these values is finite, or if none is beyond `largest`. False needs a
    second look, as a sum may overflow."""
    if largest < inf:
        return bool(torch.stack(values.aminmax()).abs().max() <= largest)
    return isfinite(values.sum(dtype=torch.float32 if values.itemsize == 2 else None).item())


def not_finite(tensors: Mapping[str, torch.Tensor], largest: float = inf) -> list[str]:
    """The names of tensors that have inf or nan in them, or an element beyond `largest`."""
    values = {n: t._values() if t.is_sparse else t for n, t in tensors.items() if t.numel()}
    if largest == inf and isfinite(get_total_norm(values.values()).item()):
        return []
    ends = {name: torch.stack(tensor.aminmax()).double().abs() for name, tensor in values.items()}
    return [name for name, both in ends.items() if not (both.isfinite() & (both <= largest)).all()]


class BadGradients:
    """The reports of gradients that are not finite, among the members of an epoch."""

    def __init__(self, world: World, clock: RoundCounter) -> None:
        self._world = world
        self._clock = clock
        self._own: dict[int, list[str]] = {}  # of two steps, as another rank may be one behind

    def report(self, names: Sequence[str]) -> None:
        """Report that this rank's gradients of these parameters are not finite at this step."""
        self._own.setdefault(self._clock.step, []).extend(names)
        self._own = dict(sorted(self._own.items())[-2:])
        with suppress(RunError):  # without the store other ranks miss the names only
            self._world.put(_key(self._world.rank), json.dumps(self._own))

    def report_from(self, bucket: GradBucket, names: Mapping[int, str]) -> list[str]:
        """Report the parameters in a bucket of DDP whose gradients are not finite, and return their
        `names`, which are given by the parameter's id."""
        if is_finite(bucket.buffer()):
            return []
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        bad = not_finite({names[id(parameter)]: gradient for parameter, gradient in pairs})
        if bad:
            self.report(bad)
        return bad

    def reports(self) -> ReportedNames:
        """The reports of all members for this step."""

        def look(store: Store) -> dict[int, bytes]:
            keys = {rank: _key(rank) for rank in self._world.members}
            return {rank: store.get(key) for rank, key in keys.items() if store.check([key])}

        with suppress(RunError):
            reports = {
                rank: json.loads(text) for rank, text in self._world.store_client.call(look).items()
            }
            step = str(self._clock.step)
            return {rank: steps[step] for rank, steps in reports.items() if step in steps}
        return {}

    def error(self, reported: ReportedNames, names: Sequence[str]) -> NotFinite:
        """The error that ends this step. `names` are those of averages, if no rank has reported."""
        where = f"on {ranks_text(sorted(reported))}" if reported else "on a rank that is not known"
        listed = dict.fromkeys(name for rank in sorted(reported) for name in reported[rank])
        shown = list(listed) or names or ["some parameter"]
        return NotFinite(shown, f" {where} at step {self._clock.step}")


def _key(rank: int) -> str:
    return f"nonfinite/{rank}"

"""Under a code several workers compute the same samples, and must get the same gradient.

Layers that draw random numbers or look at the other samples of the batch break that. With
fractional repetition a team's members have the very same samples: batch norm gives all of them the
same, if not what it would give on the whole batch, and dropout does inside `run.shared_random()`.
Other codes give members different sets of samples, and then there is no way.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from thalweg.codes import Allocation
from thalweg.declarations import listed
from thalweg.errors import PlanError

MAX_NAMED_LAYERS = 3  # names of layers that are told


def refuse_what_differs(model: nn.Module, allocation: Allocation) -> None:
    """PlanError if sums would be wrong whatever the script does."""
    codes = allocation.tree.codes.values()
    found = [*_batch_norms(model), *_dropouts(model)]
    if found and not all(code.teams for code in codes):
        raise PlanError(
            f"batch norm or dropout ({_some(found)}) makes workers with different samples disagree",
            "use code=fractional",
        )


def what_differs(model: nn.Module, *, random: bool) -> Iterator[tuple[str, str]]:
    """Why training under a code isn't the same as without, and what to do. `random`: the last
    step's loss wasn't computed inside `run.shared_random()`."""
    if norms := _batch_norms(model):
        yield (
            f"batch norm ({_some(norms)}) normalises over each worker's own samples, and its "
            "statistics are each worker's own",
            "layer or group norm give the same everywhere",
        )
    if (dropouts := _dropouts(model)) and random:
        yield (
            f"dropout ({_some(dropouts)}) drops something else on each worker, so the result "
            "depends on who was late",
            "compute the loss inside `with run.shared_random():`",
        )


def warn_of_what_differs(model: nn.Module, *, random: bool) -> None:
    """At the script's own line: the innermost that is neither Thalweg's nor torch's."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals["__name__"].startswith(("thalweg.", "torch.")):
        level, frame = level + 1, frame.f_back
    for problem, remedy in what_differs(model, random=random):
        warnings.warn(f"{problem}: {remedy}", stacklevel=level)


def _batch_norms(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]


def _dropouts(model: nn.Module) -> list[str]:
    return [
        name
        for name, layer in model.named_modules()
        if (isinstance(layer, _DropoutNd) and layer.p > 0)
        or (isinstance(layer, nn.MultiheadAttention | nn.RNNBase) and layer.dropout > 0)
    ]


def _some(names: list[str]) -> str:
    more = [f"{len(names) - MAX_NAMED_LAYERS} more"] if len(names) > MAX_NAMED_LAYERS else []
    return listed([*names[:MAX_NAMED_LAYERS], *more])

"""A check that a model gives equal gradients to all workers that compute the same samples of a
code.

Layers that draw random numbers or depend on the other samples of the batch break that. With
fractional repetition the members of a team have the very same samples: batch norm gives all of them
the same result, if not that of the global batch, and so does dropout inside `run.shared_random()`.
Other codes give members different sets of samples, and can't support such layers.
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

MAX_NAMED_LAYERS = 3  # in a message


def refuse_what_differs(model: nn.Module, allocation: Allocation) -> None:
    """Raise PlanError if the decoded sums would be wrong whatever the script does."""
    codes = allocation.tree.codes.values()
    layers = [*_batch_norms(model), *_dropouts(model)]
    if layers and not all(code.teams for code in codes):
        raise PlanError(
            f"batch norm or dropout ({_some(layers)}) makes workers with different samples "
            "disagree",
            "use code=fractional",
        )


def what_differs(model: nn.Module, *, random: bool) -> Iterator[tuple[str, str]]:
    """The reasons why training under a code differs from training without, each with a remedy.
    `random`: the last step's loss wasn't computed inside `run.shared_random()`."""
    if norms := _batch_norms(model):
        yield (
            f"batch norm ({_some(norms)}) normalises over each worker's own samples, and its "
            "statistics are each worker's own",
            "use layer or group norm, which don't depend on the other samples",
        )
    if (dropouts := _dropouts(model)) and random:
        yield (
            f"dropout ({_some(dropouts)}) drops something else on each worker, so the result "
            "depends on which worker straggles",
            "compute the loss inside `with run.shared_random():`",
        )


def warn_of_what_differs(model: nn.Module, *, random: bool) -> None:
    """Warn at the script's own line: the innermost that is neither Thalweg's nor torch's."""
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

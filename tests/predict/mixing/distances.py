"""How far apart replicas are, as measured, and how far their mean has moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Root mean square distance to the mean; `relative` to the length of the mean."""

    absolute: float
    relative: float


def drift(replicas: Sequence[ArrayLike]) -> Drift:
    """Of the parameters of every rank."""
    values = np.array([np.ravel(replica) for replica in replicas], dtype=np.float64)
    mean = values.mean(axis=0)
    absolute = float(np.sqrt(((values - mean) ** 2).sum(axis=1).mean()))
    length = float(np.linalg.norm(mean))
    relative = absolute / length if length else inf if absolute else 0.0
    return Drift(absolute=absolute, relative=relative)


def mean_moved(before: Sequence[ArrayLike], after: Sequence[ArrayLike]) -> float:
    """How far averaging has moved the mean over all ranks, relative to its length; should be
    rounding."""
    means = [
        np.array([np.ravel(replica) for replica in replicas], dtype=np.float64).mean(axis=0)
        for replicas in (before, after)
    ]
    length = float(np.linalg.norm(means[0]))
    return float(np.linalg.norm(means[1] - means[0])) / (length or 1.0)

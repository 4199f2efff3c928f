"""State that is kept from step to step, with its meaning for the other ranks.

Whoever holds such state declares by `Kept` how it combines over the ranks, so that nothing else has
to know its kind when plans or members change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from numpy.typing import NDArray

RESIDUAL_KIND = "residual"  # the part of the gradient that a rank hasn't sent yet


class Combine(Enum):
    """The meaning of the arrays of one kind on other ranks: `SUM` if each rank holds a summand and
    the sum counts, `EQUAL` if all ranks hold the same, `OWN` if the arrays mean something on this
    rank only, among these ranks."""

    SUM = "sum"
    EQUAL = "equal"
    OWN = "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The arrays of one kind, by parameter. If they are a `residual`, the mean gradient lacks their
    sum over all ranks: where they can't stay, they are added to another residual, or to the next
    gradient."""

    combine: Combine
    arrays: dict[str, NDArray[Any]]
    residual: bool = False

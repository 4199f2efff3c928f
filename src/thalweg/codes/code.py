"""What a family of gradient codes declares. A file in this folder holds a `CODE`, and nothing else
changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thalweg.codes.tree import Branches
from thalweg.declarations import Code

Plant = Callable[[Sequence[int], int, int], Branches]
"""From the workers (most reliable first), the fanout and the stragglers to who answers whom, and
the code of every parent. With as many children as workers it is a star."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFamily:
    name: str
    summary: str
    make: Callable[[int, int], Code]  # (members, stragglers)
    plant: Plant
    partial: bool = False  # whether what some have sent is part of the sum

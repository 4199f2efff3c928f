"""Rotating pairs: the circle method, by which everybody meets everybody in as few turns as can be.

One stands still, the others move one seat on at each turn, and those who sit opposite meet. With an
odd number the seat of the one who stands still is empty: who sits opposite has a bye.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def pairs(members: Sequence[T], turn: int) -> list[tuple[T, T]]:
    """Who meets whom at this turn."""
    moving: list[T | None] = list(members) if len(members) % 2 else list(members[:-1])
    standing = None if len(members) % 2 else members[-1] if members else None
    if not moving:
        return []
    shift = turn % len(moving)
    seats = [*moving[shift:], *moving[:shift]]
    opposite = [(seats[i], seats[-i]) for i in range(1, (len(seats) + 1) // 2)]
    met = [(seats[0], standing), *opposite]
    return [(one, other) for one, other in met if one is not None and other is not None]


def turns(number: int) -> int:
    """After so many, everybody has met everybody, and it begins anew."""
    return max(1, number if number % 2 else number - 1)

"""A schedule: the moves of every rank, the precondition, and the postcondition.

A schedule is data with three uses: it is checked (`check`), its time is predicted, and it is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from thalweg.errors import LayoutError
from thalweg.schedules.moves import Move, Program

Content = int | NDArray[np.float64]
"""The terms of the sum in a chunk on a rank. Bit r set: the contribution of rank r, once. Under a
gradient code a vector instead: the weight of each data block."""


@dataclass(frozen=True, slots=True)
class Condition:
    """The content of each chunk on each rank, by `content(rank, chunk)`; None if the chunk is empty
    there, or its content doesn't matter. `text` is the condition in words."""

    text: str
    content: Callable[[int, int], Content | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The ordered moves of each rank (`program`), with the conditions before and after them.
    `offsets` are the first elements of the chunks, and the number of all elements."""

    name: str
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]  # elements of each chunk
    itemsize: int
    program: Program
    before: Condition
    after: Condition
    offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", tuple(accumulate(self.sizes, initial=0)))

    @property
    def elements(self) -> int:
        """The number of elements of the whole vector."""
        return self.offsets[-1]

    def moves(self, rank: int) -> Iterator[Move]:
        """The moves of one rank, in order, without those of chunks of no elements. They are made
        lazily, and those of other ranks aren't made; LayoutError for a rank outside the group."""
        if rank not in self.ranks:
            raise LayoutError(f"rank {rank} is not in {self.name}", f"it has {self.ranks}")
        if 0 not in self.sizes:
            return self.program(rank)
        return (move for move in self.program(rank) if not self._empty(move))

    def divisor(self, rank: int) -> int:
        """The number of contributions in this rank's sum, which divides it to give the mean.
        Under a gradient code the divisor is one: the weights of samples make the sum a mean."""
        promised = self.after.content(rank, 0)
        return promised.bit_count() if isinstance(promised, int) else 1

    def _empty(self, move: Move) -> bool:
        """True if all chunks of the move have no elements. A schedule under test may have a
        negative start, which the check must still see."""
        chunks = self.sizes[max(move.start, 0) : move.stop]
        return bool(chunks) and not any(chunks)

    def span_elements(self, move: Move) -> int:
        """The number of elements in the span of a move."""
        return self.offsets[move.stop] - self.offsets[move.start]

    def span_bytes(self, move: Move) -> int:
        """The size of the span of a move in bytes."""
        return self.span_elements(move) * self.itemsize


def same_content(held: Content | None, wanted: Content) -> bool:
    """True if a chunk holds the wanted terms; weights may differ by rounding."""
    if isinstance(wanted, int):
        return isinstance(held, int) and held == wanted
    if held is None or isinstance(held, int):
        return False
    return bool((np.abs(held - wanted) <= 1e-9).all())

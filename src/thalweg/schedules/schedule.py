"""A schedule: the moves of every rank, the precondition, and the postcondition.

It is data with three uses: it is checked (`check`), its time is predicted, and it is run.
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
    """The content of each chunk on each rank; None: nothing, or nothing that matters."""

    text: str
    holds: Callable[[int, int], Content | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The ordered moves of each rank, with the condition before and the one promised after."""

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
        """The moves of one rank, in order, without those of empty chunks; nobody else's are made.

        An iterator over nothing for a rank with nothing to do; an error for one outside."""
        if rank not in self.ranks:
            raise LayoutError(f"rank {rank} is not in {self.name}", f"it has {self.ranks}")
        if 0 not in self.sizes:
            return self.program(rank)
        return (move for move in self.program(rank) if not self._empty(move))

    def divisor(self, rank: int) -> int:
        """The number of contributions in this rank's sum, to make it a mean. Under a gradient code
        the samples' weights do that, and it is one."""
        promised = self.after.holds(rank, 0)
        return promised.bit_count() if isinstance(promised, int) else 1

    def _empty(self, move: Move) -> bool:
        chunks = self.sizes[max(move.start, 0) : move.stop]
        return bool(chunks) and not any(chunks)

    def span_elements(self, move: Move) -> int:
        """The number of elements in the span of a move."""
        return self.offsets[move.stop] - self.offsets[move.start]

    def span_bytes(self, move: Move) -> int:
        """The size of the span of a move in bytes."""
        return self.span_elements(move) * self.itemsize


def same_content(held: Content | None, wanted: Content) -> bool:
    if isinstance(wanted, int):
        return isinstance(held, int) and held == wanted
    if held is None or isinstance(held, int):
        return False
    return bool((np.abs(held - wanted) <= 1e-9).all())

"""A schedule: who does which moves, what they start from, and what they promise.

It is data with three readings: it is checked (`check`), priced, and run.
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
"""What a chunk on a rank is the sum of. Bit r set: the contribution of rank r, once. Under a
gradient code a vector instead: the weight of each data block."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What each rank holds of each chunk; None: nothing, or nothing that matters."""

    text: str
    holds: Callable[[int, int], Content | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Each rank's moves, in order; what everybody holds before, and promises to hold after."""

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
        """How many numbers are to be added up."""
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
        """How many contributions this rank's result is the sum of, to make it a mean. Under a
        gradient code the samples' weights see to that, and it is one."""
        promised = self.after.holds(rank, 0)
        return promised.bit_count() if isinstance(promised, int) else 1

    def _empty(self, move: Move) -> bool:
        chunks = self.sizes[max(move.start, 0) : move.stop]
        return bool(chunks) and not any(chunks)

    def span_elements(self, move: Move) -> int:
        """How many numbers a move carries."""
        return self.offsets[move.stop] - self.offsets[move.start]

    def span_bytes(self, move: Move) -> int:
        """How many bytes a move carries."""
        return self.span_elements(move) * self.itemsize


def same_content(held: Content | None, wanted: Content) -> bool:
    if isinstance(wanted, int):
        return isinstance(held, int) and held == wanted
    if held is None or isinstance(held, int):
        return False
    return bool((np.abs(held - wanted) <= 1e-9).all())

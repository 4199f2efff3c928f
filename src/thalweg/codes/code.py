"""What a gradient code declares. A file in this folder holds a `CODE`, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ParentCode(Protocol):
    """A code for the children of one parent: n blocks of data, of which child i sends the sum
    weighted by row i, and a way to get the plain sum of all blocks from enough children."""

    @property
    def members(self) -> int: ...

    @property
    def stragglers(self) -> int: ...

    def row(self, member: int) -> NDArray[np.float64]: ...

    def decode(self, arrived: frozenset[int]) -> Mapping[int, float] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFamily:
    name: str
    summary: str
    make: Callable[[int, int], ParentCode]  # (members, stragglers)

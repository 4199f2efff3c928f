"""Fractional repetition (Tandon et al., ICML 2017, section 3.1).

The n children form n/(s+1) teams of s+1; a team's members all hold the same s+1 blocks, weight 1.
The sum of one answer from each team is the sum of all blocks: any s may be missing, and more if
they are in different teams. Members of a team send the same bits, and teams are added in a fixed
order, so the result is the same bit for bit whoever was late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thalweg.codes.code import CodeFamily
from thalweg.declarations import listed
from thalweg.errors import LayoutError


@dataclass(frozen=True, slots=True)
class FractionalRepetition:
    members: int
    stragglers: int

    def __post_init__(self) -> None:
        team = self.stragglers + 1
        if self.members % team:
            fitting = [s for s in range(1, self.members) if self.members % (s + 1) == 0]
            use = f"stragglers={listed(map(str, fitting), 'or')}, or another number of workers"
            raise LayoutError(
                f"{self.members} workers don't form teams of {team} (stragglers={self.stragglers})",
                f"use {use}" if fitting else "use more workers",
            )

    def row(self, member: int) -> NDArray[np.float64]:
        weights = np.zeros(self.members)
        team = self.stragglers + 1
        first = member // team * team
        weights[first : first + team] = 1.0
        return weights

    def decode(self, arrived: frozenset[int]) -> Mapping[int, float] | None:
        team = self.stragglers + 1
        first: dict[int, int] = {}
        for member in sorted(arrived):
            first.setdefault(member // team, member)
        complete = len(first) == self.members // team
        return dict.fromkeys(first.values(), 1.0) if complete else None


CODE = CodeFamily(
    name="fractional",
    summary="teams of s+1 replicas: all weights one, bit-reproducible",
    make=FractionalRepetition,
)

"""Some members who average among themselves, beginning at one step, and whether that mixes all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from thalweg.schedules.group import Group


@dataclass(frozen=True, slots=True)
class AveragingGroup:
    """`lasts` is how many steps its members take until the result is applied. Meanwhile they meet
    nobody else, so it doesn't matter to the result how long the exchange really takes."""

    group: Group
    lasts: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.group.ranks


def connected(ranks: Iterable[int], steps: Iterable[Iterable[tuple[int, ...]]]) -> bool:
    """Whether what one rank knows gets to all others through the groups that meet at these steps;
    looks at no more steps than it takes."""
    root = {rank: rank for rank in ranks}
    apart = len(root)

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = rank = root[root[rank]]
        return rank

    for meetings in steps:
        for members in meetings:
            for member in members:
                one, other = find(member), find(members[0])
                root[one] = other
                apart -= one != other
        if apart == 1:
            return True
    return apart <= 1

"""Averaging groups, which begin at one step, and the check that they connect all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from thalweg.schedules.group import Group


@dataclass(frozen=True, slots=True)
class AveragingGroup:
    """Members that average among themselves; the result is applied after `lasts` steps. Meanwhile
    they are in no other group, so the duration of the exchange doesn't affect the result."""

    group: Group
    lasts: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.group.ranks


def connected(ranks: Iterable[int], steps: Iterable[Iterable[tuple[int, ...]]]) -> bool:
    """True if information of one rank reaches all others through the groups of these steps; stops
    at the first step at which it does."""
    root = {rank: rank for rank in ranks}
    apart = len(root)

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = rank = root[root[rank]]
        return rank

    for groups in steps:
        for members in groups:
            for member in members:
                one, other = find(member), find(members[0])
                root[one] = other
                apart -= one != other
        if apart == 1:
            return True
    return apart <= 1

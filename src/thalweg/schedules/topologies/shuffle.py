"""Divide and shuffle (DS-Sync, Wang et al., 2022): small groups average, and members take turns.

At every step one representative of each rack meets those of the other racks, and the rest of each
rack meet among themselves, all at the same time; the representatives rotate. Replicas differ, but
everybody's knowledge reaches everybody as long as the union of all groups over a period is
connected. Where it isn't (all racks of two), every second step is left to whole racks.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from thalweg.schedules.group import Group
from thalweg.schedules.topologies.ring import ring
from thalweg.schedules.topology import Topology

Groups = list[tuple[int, ...]]


def groups(group: Group, step: int) -> tuple[Group, ...]:
    """Who meets at this step: a partition of the members."""
    if not _mixes(group):
        step, whole_racks = divmod(step, 2)
        if whole_racks:
            return tuple(group.subgroup(rack) for rack in group.racks)
    return tuple(group.subgroup(members) for members in _representatives(group, step))


def period(group: Group) -> int:
    turns = lcm(*(len(rack) for rack in group.racks))
    return turns if _mixes(group) else 2 * turns


def _mixes(group: Group) -> bool:
    """Whether representatives alone connect everybody over one period. With whole racks in between
    they always do: a rack is connected by itself, and its representatives connect it to all."""
    turns = lcm(*(len(rack) for rack in group.racks))
    return connected(group.ranks, (_representatives(group, turn) for turn in range(turns)))


def _representatives(group: Group, turn: int) -> Groups:
    chosen = [rack[turn % len(rack)] for rack in group.racks]
    staying = [tuple(r for r in rack if r not in chosen) for rack in group.racks]
    return [tuple(chosen), *(members for members in staying if members)]


def connected(ranks: tuple[int, ...], steps: Iterable[Groups]) -> bool:
    """Whether what one rank knows gets to all others through the groups of these steps; looks at
    no more steps than it takes."""
    root = {rank: rank for rank in ranks}
    apart = len(ranks)

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = rank = root[root[rank]]
        return rank

    for meeting in steps:
        for members in meeting:
            for member in members:
                one, other = find(member), find(members[0])
                root[one] = other
                apart -= one != other
        if apart == 1:
            return True
    return apart == 1


TOPOLOGY = Topology(
    name="shuffle",
    summary="small groups by turns: one of each rack between the racks, the others inside",
    build=ring,
    groups=groups,
    period=period,
    mixes=True,
)

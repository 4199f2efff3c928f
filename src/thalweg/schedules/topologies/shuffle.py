"""Divide and shuffle (DS-Sync, Wang et al., 2022): small groups average, and members take turns.

At every step one representative of each rack meets those of the other racks, and the rest of each
rack meet among themselves, all at the same time; the representatives rotate. Replicas differ, but
everybody's knowledge reaches everybody as long as the union of all groups over a period is
connected. Where it isn't (all racks of two), every second step is left to whole racks.
"""

from __future__ import annotations

from math import lcm

from thalweg.errors import LayoutError
from thalweg.schedules.group import Group
from thalweg.schedules.topologies.ring import ring
from thalweg.schedules.topology import Topology

Groups = list[tuple[int, ...]]


def groups(group: Group, step: int) -> tuple[Group, ...]:
    """Who meets at this step: a partition of the members."""
    table = _table(group)
    return tuple(group.subgroup(members) for members in table[step % len(table)])


def period(group: Group) -> int:
    return len(_table(group))


def _table(group: Group) -> list[Groups]:
    """The groups of every step of one period, the first of two patterns that mixes."""
    turns = lcm(*(len(rack) for rack in group.racks))
    base = [_representatives(group, turn) for turn in range(turns)]
    whole = [tuple(rack) for rack in group.racks]
    for table in (base, [meeting for step in base for meeting in (step, whole)]):
        if connected(group.ranks, [members for meeting in table for members in meeting]):
            return table
    raise LayoutError(
        f"no table of groups mixes {group.size} members in {len(group.racks)} racks",
        "use hierarchical or ring",
    )


def _representatives(group: Group, turn: int) -> Groups:
    chosen = [rack[turn % len(rack)] for rack in group.racks]
    staying = [tuple(r for r in rack if r not in chosen) for rack in group.racks]
    return [tuple(chosen), *(members for members in staying if members)]


def connected(ranks: tuple[int, ...], meetings: Groups) -> bool:
    """Whether what one rank knows gets to all others through these groups."""
    root = {rank: rank for rank in ranks}

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = rank = root[root[rank]]
        return rank

    for members in meetings:
        for member in members:
            root[find(member)] = find(members[0])
    return len({find(rank) for rank in ranks}) == 1


TOPOLOGY = Topology(
    name="shuffle",
    summary="small groups by turns: one of each rack between the racks, the others inside",
    build=ring,
    groups=groups,
    period=period,
    mixes=True,
)

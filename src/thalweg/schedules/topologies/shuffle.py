"""Divide and shuffle (DS-Sync, Wang et al., 2022): small groups average, and members take turns.

At every step one representative of each rack meets those of the other racks, and the rest of each
rack meet among themselves, all at the same time; the representatives rotate. What is too slow for
that takes several steps for a meeting, and nobody waits for it (`schedules/table.py`).

Replicas differ, but everybody's knowledge reaches everybody, and their mean is kept.
"""

from __future__ import annotations

from math import lcm

from thalweg.declarations import Parameter
from thalweg.schedules.group import Group
from thalweg.schedules.schedule import Schedule
from thalweg.schedules.shuffle.averaging_group import AveragingGroup
from thalweg.schedules.shuffle.contended_links import ContendedLinks
from thalweg.schedules.shuffle.group_table import choose_table
from thalweg.schedules.topologies.ring import pieces_of, round_ring
from thalweg.schedules.topology import Topology


def groups(group: Group, step: int) -> tuple[AveragingGroup, ...]:
    """The meetings that begin at this step; nobody is in two at a time."""
    return tuple(choose_table(group).begin(step))


def period(group: Group) -> int:
    return choose_table(group).period


def adopted(group: Group) -> ContendedLinks:
    """What is kept apart in this group's table."""
    return choose_table(group).contention


def _by_turns(group: Group, elements: int, itemsize: int, step: int, adjust: bool) -> Schedule:
    """A ring that goes the other way at every second step: then each link is seen with two others,
    and it can be told which is slow."""
    order = group.order[:: -1 if step % 2 else 1]
    pieces = 2 * pieces_of(group, elements, itemsize)
    return round_ring("ring", group, order, elements, itemsize, pieces)


TOPOLOGY = Topology(
    name="shuffle",
    summary="small groups by turns: one of each rack between the racks, the others inside",
    build=_by_turns,
    groups=groups,
    keeps_apart=adopted,
    period=lambda group: lcm(2, period(group)),
    mixes=True,
    parameters={
        "adjust": Parameter(
            kind=bool, default=True, help="whether groups follow what links give while training"
        )
    },
)

"""Divide and shuffle (DS-Sync, Wang et al., 2022): small groups average, and members take turns.

At every step one delegate of each rack averages with those of the other racks, and the rest of each
rack among themselves, all at the same time; the delegates rotate. Contended links take several
steps for an averaging, and no rank waits for them (`schedules/shuffle/group_table.py`).

Replicas differ, but information of every rank reaches all others, and their mean is kept.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from thalweg.declarations import Parameter
from thalweg.schedules import AveragingGroup, Group, Schedule, Topology
from thalweg.schedules.closed_form import Symbols
from thalweg.schedules.shuffle.group_table import choose_table
from thalweg.schedules.topologies.ring import pieces_of, ring_cost, round_ring


def groups(group: Group, step: int) -> tuple[AveragingGroup, ...]:
    """The averaging groups that begin at this step; no rank is in two at a time."""
    begun = choose_table(group).begin(step)
    return tuple(AveragingGroup(group.subgroup(members), lasts) for members, lasts in begun)


def _by_turns(group: Group, elements: int, itemsize: int, step: int, adjust: bool) -> Schedule:
    """A ring in reverse order at every second step: then each link is measured with two others,
    which identifies the slow one."""
    order = group.order[:: -1 if step % 2 else 1]
    pieces = 2 * pieces_of(group, elements, itemsize)
    return round_ring("ring", group, order, elements, itemsize, pieces)


def scopes(x: Symbols) -> tuple[Symbols, ...]:
    """One of each rack, and concurrently the rest of a rack."""
    delegates = replace(x, N=x.C, G=1)
    rest = replace(x, N=x.G - 1, C=1, G=x.G - 1)
    return (delegates, rest) if x.G > 1 else (delegates,)


TOPOLOGY = Topology(
    name="shuffle",
    summary="small groups by turns: one of each rack between the racks, the others inside",
    build=_by_turns,
    groups=groups,
    keeps_apart=lambda group: choose_table(group).contention,
    period=lambda group: lcm(2, choose_table(group).period),
    mixes=True,
    form=lambda x, adjust=True: ring_cost(x),  # of one group, which is a ring
    scopes=scopes,
    variants=(),  # the preset `dssync` is
    parameters={
        "adjust": Parameter(
            kind=bool,
            default=True,
            help="adapt groups to the measured rates of links during training",
        )
    },
)

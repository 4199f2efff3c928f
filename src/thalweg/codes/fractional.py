"""Fractional repetition (Tandon et al., ICML 2017, section 3.1).

The n children form teams of s+1 or more; a team's members all send the same block, weight 1. The
sum of one answer from each team is the sum of all blocks: any s may be missing, and more if they
are in different teams. Members of a team send the same bits, and teams are added in a fixed order,
so the result is bit for bit the same whichever workers are stragglers.

In a tree a team of replicas has replicas of everything below it, so a *place* at depth d is filled
by (s+1)^d workers, which all compute the same cell of the data. Places are filled layer by layer,
n/(s+1) below each; M places make M equal cells, and every worker computes one. For n + n^2 + ... +
n^L workers that is CodedReduce's regular tree. Workers that are too few for another place are
spare members of teams in the last layer.

    stragglers=1, fanout=4         root                        2 + 4 places: cells of 1/6
                        a a                 b b                (each letter a cell,
                 cc dd   cc dd       ee ff   ee ff              each copy a worker)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from thalweg.codes.tree import TREE_ROOT, CodedTree, CodeFamily, refuse_what_does_not_fit
from thalweg.declarations import Variant


@dataclass(frozen=True, slots=True)
class FractionalRepetition:
    """A code of teams, of near-equal sizes unless `teams` gives them."""

    members: int
    stragglers: int
    teams: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        refuse_what_does_not_fit(self.members, self.members, self.stragglers)
        if not self.teams:
            number = self.members // (self.stragglers + 1)
            size, larger = divmod(self.members, number)
            sizes = (size + 1,) * larger + (size,) * (number - larger)
            object.__setattr__(self, "teams", sizes)

    def row(self, member: int) -> NDArray[np.float64]:
        weights = np.zeros(len(self.teams))
        weights[bisect_right(list(accumulate(self.teams)), member)] = 1.0
        return weights

    def decode(self, arrived: frozenset[int]) -> Mapping[int, float] | None:
        chosen: dict[int, float] = {}
        stop = 0
        for size in self.teams:
            start, stop = stop, stop + size
            first = next((member for member in range(start, stop) if member in arrived), None)
            if first is None:
                return None
            chosen[first] = 1.0
        return chosen


@dataclass(eq=False, slots=True)
class _CellGroup:
    """A place in the tree at which `copies` workers compute the same cell of the data."""

    depth: int
    copies: int
    below: list[_CellGroup] = field(default_factory=list)

    def shallowest_first(self) -> Iterator[_CellGroup]:
        layer = [self]
        while layer:
            yield from layer
            layer = [lower for place in layer for lower in place.below]


def team_tree(workers: Sequence[int], fanout: int, stragglers: int) -> CodedTree:
    refuse_what_does_not_fit(len(workers), fanout, stragglers)
    team = stragglers + 1
    root, left = _CellGroup(0, 1), len(workers)
    while (above := _next_place(root, left, fanout, team)) is not None:
        copies = above.copies * team
        above.below.append(_CellGroup(above.depth + 1, copies))
        left -= copies
    return _filled(root, workers, team)


def _next_place(root: _CellGroup, left: int, fanout: int, team: int) -> _CellGroup | None:
    """The place below which to add another one: the next in line, or, if too few workers are left
    for it and there is no room for them as spare members, the deepest that they suffice for, beyond
    the fanout."""
    places = list(root.shallowest_first())
    above = next(place for place in places if len(place.below) < fanout // team)
    if above.copies * team <= left:
        return above
    inner = [place for place in places if place.below]
    room = sum(place.copies * max(0, fanout - team * len(place.below)) for place in inner)
    affordable = [place for place in inner if place.copies * team <= left]
    if room >= left or not affordable:
        return None
    return min(affordable, key=lambda place: (-place.depth, len(place.below)))


def _filled(root: _CellGroup, workers: Sequence[int], team: int) -> CodedTree:
    """The tree with these workers at its places."""
    unplaced = iter(workers)
    teams: dict[int, list[list[int]]] = {TREE_ROOT: []}  # of every node, place by place
    filled: dict[_CellGroup, list[int]] = {root: [TREE_ROOT]}
    for place in root.shallowest_first():
        for lower in place.below:
            filled[lower] = []
            for node in filled[place]:
                members = [next(unplaced) for _ in range(team)]
                teams |= {member: [] for member in members}
                teams[node].append(members)
                filled[lower] += members
    for spare in unplaced:  # to the node with fewest children, in the last layer
        last = [(own, some) for own in teams.values() for some in own if not teams[some[0]]]
        _, smallest = min(last, key=lambda entry: (sum(map(len, entry[0])), len(entry[1])))
        smallest.append(spare)
        teams[spare] = []
    children = {node: tuple(m for some in own for m in some) for node, own in teams.items()}
    codes = {
        node: FractionalRepetition(len(children[node]), team - 1, tuple(map(len, own)))
        for node, own in teams.items()
        if own
    }
    return CodedTree(children, codes)


CODE = CodeFamily(
    name="fractional",
    summary="teams of s+1 replicas: all weights one, bit-reproducible",
    make=FractionalRepetition,
    build_tree=team_tree,
    partial=True,
    variants=(
        Variant(text="gc(stragglers=1)"),
        Variant(text="gc(stragglers=2)"),
        Variant(text="codedreduce(stragglers=1)"),
    ),
)

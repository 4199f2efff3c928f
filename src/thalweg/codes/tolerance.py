"""The number of stragglers that a coded tree tolerates, depending on where they are.

A worker delivers if it isn't a straggler itself and no more than `spare` are missing of every
*quota* of its children. A team of replicas is a quota of which one is enough; the children of a
code with real weights are one quota, of which any s may be missing. A step has to wait if more are
missing of a quota of the root's.

The positions of stragglers matter, not only their number. In the regular tree of n children and L
layers, of which any s of every n may be missing,

    s                              are borne wherever they are: s+1 in the first layer stop a step
    (s+1)^L - 1                    are borne wherever they are in the last layer
    s (1 + n + ... + n^(L-1))      are borne if no parent misses more than s
    at least sum n^l - (n-s)^l     are borne if they are where they harm least

(s^L, which is sometimes claimed, is none of these). Here the numbers come from the tree itself,
regular or not, with workers for whom they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from thalweg.codes.tree import TREE_ROOT, CodedTree

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quota:
    """Children of one parent, of which any `spare` may be missing."""

    members: Ranks
    spare: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The numbers of stragglers among `workers` that a step tolerates. The root's own process isn't
    one of them: it has to answer."""

    workers: int
    per_parent: int
    parents: int
    breaking: Ranks  # the fewest stragglers that make a step wait
    breaking_leaves: Ranks  # the fewest among the leaves
    enough: Ranks  # the fewest workers on time that a step can do with

    @property
    def anywhere(self) -> int:
        """The number tolerated wherever the stragglers are."""
        return len(self.breaking) - 1

    @property
    def leaves(self) -> int:
        """The number tolerated if all stragglers are leaves."""
        return len(self.breaking_leaves) - 1

    @property
    def under_every_parent(self) -> int:
        """The number tolerated if no parent has more of them than its code allows."""
        return self.per_parent * self.parents

    @property
    def at_best(self) -> int:
        """The number tolerated where the stragglers do the least harm."""
        return self.workers - len(self.enough)


def tolerance(tree: CodedTree) -> Tolerance:
    anybody = _cheapest(tree, lost=lambda node, below: () if node == TREE_ROOT else (node,))
    leaves = _cheapest(tree, lost=lambda node, below: (node,) if not below else ())
    return Tolerance(
        workers=len(tree.workers),
        per_parent=min(code.stragglers for code in tree.codes.values()),
        parents=len(tree.codes),
        breaking=anybody,
        breaking_leaves=leaves,
        enough=_enough(tree),
    )


def quotas(tree: CodedTree, node: int) -> list[Quota]:
    """The quotas of a node's children; a leaf has no quotas."""
    code, children = tree.codes.get(node), tree.children[node]
    if code is None:
        return []
    if code.teams:
        stops = list(accumulate(code.teams))
        teams = [children[stop - size : stop] for stop, size in zip(stops, code.teams, strict=True)]
        return [Quota(team, len(team) - 1) for team in teams]
    return [Quota(children, code.stragglers)]


def chance_of_waiting(tree: CodedTree, late: Mapping[int, float]) -> float:
    """The probability that a step has to wait, if each worker is a straggler with its own
    probability, independently of the others."""
    missing: dict[int, float] = {}
    for node in reversed(list(tree.top_down())):
        delivers = 1.0 - late.get(node, 0.0)
        for quota in quotas(tree, node):
            delivers *= _at_most([missing[member] for member in quota.members], quota.spare)
        missing[node] = 1.0 - delivers
    return missing[TREE_ROOT]


def _cheapest(tree: CodedTree, lost: Callable[[int, Ranks], Ranks]) -> Ranks:
    """The fewest stragglers that keep the root from decoding; `lost` names those that make a node
    fail by itself, none if it can't."""
    cheapest: dict[int, Ranks] = {}
    for node in reversed(list(tree.top_down())):
        by_quota = [
            _together(sorted((cheapest[m] for m in quota.members), key=len)[: quota.spare + 1])
            for quota in quotas(tree, node)
        ]
        itself = lost(node, tree.children[node])
        cheapest[node] = min([itself] if itself else by_quota, key=len)
    return cheapest[TREE_ROOT]


def _enough(tree: CodedTree) -> Ranks:
    sufficient: dict[int, Ranks] = {}
    for node in reversed(list(tree.top_down())):
        needed: list[Ranks] = [() if node == TREE_ROOT else (node,)]
        for quota in quotas(tree, node):
            by_cost = sorted((sufficient[member] for member in quota.members), key=len)
            needed += by_cost[: len(by_cost) - quota.spare]
        sufficient[node] = _together(needed)
    return sufficient[TREE_ROOT]


def _together(parts: list[Ranks]) -> Ranks:
    return tuple(sorted(rank for part in parts for rank in part))


def _at_most(chances: list[float], number: int) -> float:
    """The probability that at most `number` of independent events with these chances happen."""
    by_count = [1.0] + [0.0] * number
    for chance in chances:
        by_count = [
            by_count[i] * (1 - chance) + (by_count[i - 1] * chance if i else 0.0)
            for i in range(number + 1)
        ]
    return sum(by_count)

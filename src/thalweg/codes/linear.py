"""Gradient codes whose weights are real numbers; and, for any gradient code, the trees of children
and the amplification of rounding errors.

Row i of the n x k matrix B has the weights of the k blocks of data in the answer of child i. B has
rank n-s, and any n-s of its rows span the same space, which contains the vector of ones; so the
answers of all but s stragglers decode to the plain sum: their weights a satisfy a B = 1. One
solution a0 of this, and a basis V (n x s) of the solutions of a B = 0, are computed once. For the
set T of stragglers, the s x s system V_T c = -a0_T gives the solution a = a0 + V c, which is zero
on T; the index T selects the rows of T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import combinations
from math import comb
from random import Random

import numpy as np
from numpy.typing import NDArray

from thalweg.codes.tree import BuildCodedTree, CodedTree, even_children
from thalweg.declarations import Code

Matrix = NDArray[np.float64]
# Sets of stragglers that are examined; drawn from a fixed seed if there are more.
MAX_STRAGGLER_SETS = 1000
DECODE_CACHE_ENTRIES = 4096  # decoding vectors


class LinearCode:
    """A code with the matrix B, for `members` children (n) and `stragglers` (s)."""

    teams: tuple[int, ...] = ()  # none: every child sends another block

    def __init__(self, members: int, stragglers: int, matrix: Matrix) -> None:
        self.members = members
        self.stragglers = stragglers
        self.matrix = matrix
        self._sum_weights = np.linalg.lstsq(matrix.T, np.ones(matrix.shape[1]), rcond=None)[0]  # a0
        left, _, _ = np.linalg.svd(matrix)
        self._null_basis = left[:, members - stragglers :]  # V
        self._solution = lru_cache(DECODE_CACHE_ENTRIES)(self._solve)

    def __repr__(self) -> str:
        return f"LinearCode(members={self.members}, stragglers={self.stragglers})"

    def row(self, member: int) -> Matrix:
        row: Matrix = self.matrix[member]
        return row

    def decode(self, arrived: frozenset[int]) -> Mapping[int, float] | None:
        """The weights of the answers that have arrived; None if they are fewer than n-s. With more
        than n-s, c is the least-squares solution of least norm."""
        if len(arrived) < self.members - self.stragglers:
            return None
        return self._solution(arrived)

    def _solve(self, arrived: frozenset[int]) -> Mapping[int, float]:
        weights, late = self._sum_weights, sorted(set(range(self.members)) - arrived)
        if self.stragglers and late:
            coefficients = np.linalg.lstsq(self._null_basis[late], -weights[late], rcond=None)[0]
            weights = weights + self._null_basis @ coefficients
        return {member: float(weights[member]) for member in sorted(arrived)}


def even_tree(make: Callable[[int, int], Code]) -> BuildCodedTree:
    """A builder of trees with near-equal subtrees and a code for the children of each parent."""

    def build(workers: Sequence[int], fanout: int, stragglers: int) -> CodedTree:
        children = even_children(workers, fanout, stragglers)
        codes = {node: make(len(below), stragglers) for node, below in children.items() if below}
        return CodedTree(children, codes)

    return build


@cache
def amplification(code: Code) -> float:
    """The growth of the answers' rounding errors in the sum, for the worst set of stragglers: the
    largest sum of |a_i b_ij| over children i, for any block j. One for a plain sum."""
    members = range(code.members)
    rows = np.abs([code.row(member) for member in members])
    worst = 1.0
    for late in straggler_sets(code):
        weights = code.decode(frozenset(members) - late)
        if weights is not None:
            used = np.array([abs(weights.get(member, 0.0)) for member in members])
            worst = max(worst, float((used @ rows).max()))
    return worst


def straggler_sets(code: Code, most: int = MAX_STRAGGLER_SETS) -> list[frozenset[int]]:
    """The sets of as many stragglers as the code tolerates: all of them if there are at most
    `most`, else a fixed sample with sets of successive children and random ones."""
    members, late = range(code.members), code.stragglers
    if comb(code.members, late) <= most:
        return [*map(frozenset, combinations(members, late))]
    draw = Random(0)
    runs = [frozenset((first + i) % code.members for i in range(late)) for first in members]
    return runs + [frozenset(draw.sample(members, late)) for _ in range(most - len(runs))]

"""CR.Allocate (Reisizadeh et al., CodedReduce): the part of the data that each worker computes and
its weight, so that every parent can decode without s of its children.

    give(root, everything)
    give(node, pool): cut the pool into the blocks of the node's code;
                      child i gets the blocks of row i, times their weights;
                      it keeps some of each as its own cells, and its children are given the rest

A node's answer, its own cells plus what its children's answers decode to, is then what its parent's
code requires: the weighted sum of its blocks. Weights multiply along the path.

The part that a node keeps follows from what its subtree can carry at one unit per worker at most:
`capacity` = 1 + what the children can carry. In a regular tree all loads are then the paper's

    r = 1 / (q + q^2 + ... + q^L),   q = n / (s+1)

and in any other they are as equal as the siblings' subtrees are. All fractions are exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from thalweg.codes.linear import amplification
from thalweg.codes.tree import TREE_ROOT, CodedTree
from thalweg.declarations import Code
from thalweg.errors import LayoutError

MAX_ERROR_AMPLIFICATION = 1e3  # above this float32 answers give four digits or fewer
Stretch = tuple[Fraction, Fraction, float]
"""The begin and end of a part of the data, which lies between 0 and 1, and its weight so far."""


@dataclass(frozen=True)
class Allocation:
    """The cells of the data that each worker computes. The root runs in the process of rank `host`.
    Cell i lies between `cuts[i]` and `cuts[i + 1]`; `weights` are each worker's, by cell."""

    host: int
    tree: CodedTree
    cuts: tuple[Fraction, ...]
    weights: Mapping[int, Mapping[int, float]]

    @property
    def cells(self) -> int:
        return len(self.cuts) - 1

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(self.weights)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers, and the root's process if it isn't a worker."""
        return self.workers if self.host in self.weights else (self.host, *self.workers)

    @cached_property
    def above(self) -> dict[int, int]:
        """The process to which each worker sends answers, and from which it receives results."""
        parents = self.tree.parents
        return {
            worker: self.host if parents[worker] == TREE_ROOT else parents[worker]
            for worker in self.workers
            if worker != self.host
        }

    @cached_property
    def below(self) -> dict[int, tuple[int, ...]]:
        """The processes to which each rank sends results, those of the root first."""
        children = self.tree.children
        return {
            rank: tuple(
                child
                for node in ([TREE_ROOT, rank] if rank == self.host else [rank])
                for child in children.get(node, ())
                if child != self.host
            )
            for rank in self.ranks
        }

    @cached_property
    def loads(self) -> dict[int, Fraction]:
        """The part of the data that each worker computes."""
        return {
            worker: sum(map(self._size, own), start=Fraction(0))
            for worker, own in self.weights.items()
        }

    @cached_property
    def amplification(self) -> float:
        """The worst growth of rounding errors on the path to the root."""
        worst = {node: amplification(code) for node, code in self.tree.codes.items()}
        return max(
            prod(worst[node] for node in self._decoders_above(worker))
            for worker in self.tree.workers
        )

    def cell_weights(self, rank: int) -> NDArray[np.float64]:
        """The weight of every cell in the contribution of this rank."""
        contents = np.zeros(self.cells)
        for cell, weight in self.weights.get(rank, {}).items():
            contents[cell] = weight
        return contents

    def samples(self, rank: int, batch: int) -> list[tuple[int, int, float]]:
        """The samples of a batch that this rank computes: from, up to, and their weight."""
        at = [round(cut * batch) for cut in self.cuts]
        return [
            (at[cell], at[cell + 1], weight)
            for cell, weight in self.weights.get(rank, {}).items()
            if at[cell] < at[cell + 1]
        ]

    def suffices(self, batch: int) -> bool:
        """True if every worker has a sample of a batch of this size."""
        return all(self.samples(worker, batch) for worker in self.workers)

    def refuse_batch(self, batch: int) -> None:
        """Raise LayoutError if a worker has no sample of a batch, and so nothing to send."""
        for worker in self.workers:
            if not self.samples(worker, batch):
                enough = max(
                    -(-1 // max(self._size(cell) for cell in own)) for own in self.weights.values()
                )
                raise LayoutError(
                    f"a batch of {batch} has no sample for worker {worker}, which computes "
                    f"{self.loads[worker]} of it",
                    f"give a batch of {enough} or more",
                )

    def _size(self, cell: int) -> Fraction:
        return self.cuts[cell + 1] - self.cuts[cell]

    def _decoders_above(self, worker: int) -> list[int]:
        """The nodes that decode the answers of this worker, or pass them on, up to the root."""
        parents = self.tree.parents
        path = []
        while worker != TREE_ROOT:
            worker = parents[worker]
            path.append(worker)
        return path


def allocate(tree: CodedTree, host: int) -> Allocation:
    capacity = _capacities(tree)
    kept: dict[int, list[Stretch]] = {}
    pools: dict[int, list[Stretch]] = {TREE_ROOT: [(Fraction(0), Fraction(1), 1.0)]}
    for node in tree.top_down():
        below = tree.children[node]
        if not below:
            continue
        code = tree.codes[node]
        blocks = _cut(pools.pop(node), _block_sizes(code, [capacity[child] for child in below]))
        for member, child in enumerate(below):
            share = [
                (start, stop, weight * factor)
                for factor, block in zip(code.row(member).tolist(), blocks, strict=True)
                for start, stop, weight in (block if factor else ())
            ]
            kept[child], pools[child] = _keep(share, 1 / capacity[child])
    return _in_cells(tree, host, kept)


def refuse_inaccurate(allocation: Allocation, name: str) -> None:
    if allocation.amplification > MAX_ERROR_AMPLIFICATION:
        raise LayoutError(
            f"code={name} would amplify rounding errors {allocation.amplification:.0f} times here, "
            "more than float32 allows",
            "use code=fractional, or fewer children or stragglers",
        )


def _capacities(tree: CodedTree) -> dict[int, Fraction]:
    """The part that each worker's subtree carries at one unit per worker."""
    capacities: dict[int, Fraction] = {}
    for node in reversed(list(tree.top_down())):
        below = [capacities[child] for child in tree.children[node]]
        capacities[node] = Fraction(1)
        if below:  # the largest pool of which no child gets more than its capacity
            code = tree.codes[node]
            sizes = np.array(_block_sizes(code, below))
            capacities[node] += min(
                capacity / sum(sizes[np.flatnonzero(code.row(member))])
                for member, capacity in enumerate(below)
            )
    return capacities


def _block_sizes(code: Code, capacities: Sequence[Fraction]) -> list[Fraction]:
    """Equal blocks, or, if every child has only one, blocks as large as children can carry."""
    rows = np.array([code.row(member) for member in range(code.members)])
    number = rows.shape[1]
    if (np.count_nonzero(rows, axis=1) > 1).any():
        return [Fraction(1, number)] * number
    carried = [
        min(c for c, weight in zip(capacities, rows[:, block], strict=True) if weight)
        for block in range(number)
    ]
    return [capacity / sum(carried, start=Fraction(0)) for capacity in carried]


def _cut(pool: Iterable[Stretch], sizes: Sequence[Fraction]) -> list[list[Stretch]]:
    """The pool in consecutive blocks of these sizes, which are fractions of the pool and add up to
    one."""
    stretches = list(pool)
    total = sum((stop - start for start, stop, _ in stretches), start=Fraction(0))
    bounds = [bound * total for bound in accumulate(sizes, initial=Fraction(0))]
    blocks: list[list[Stretch]] = [[] for _ in sizes]
    at = Fraction(0)
    for start, stop, weight in stretches:
        for block, (low, high) in zip(blocks, pairwise(bounds), strict=True):
            begin, end = max(start, start + low - at), min(stop, start + high - at)
            if begin < end:
                block.append((begin, end, weight))
        at += stop - start
    return blocks


def _keep(share: Iterable[Stretch], part: Fraction) -> tuple[list[Stretch], list[Stretch]]:
    """A fixed part of every stretch, and the rest of each."""
    own, rest = [], []
    for start, stop, weight in share:
        middle = start + (stop - start) * part
        own.append((start, middle, weight))
        if middle < stop:
            rest.append((middle, stop, weight))
    return own, rest


def _in_cells(tree: CodedTree, host: int, kept: Mapping[int, list[Stretch]]) -> Allocation:
    cuts = sorted(
        {point for own in kept.values() for start, stop, _ in own for point in (start, stop)}
    )
    weights = {
        worker: {
            cell: weight
            for start, stop, weight in kept[worker]
            for cell in range(bisect_left(cuts, start), bisect_left(cuts, stop))
        }
        for worker in tree.workers
    }
    return Allocation(host=host, tree=tree, cuts=tuple(cuts), weights=weights)

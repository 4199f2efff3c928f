"""Trees to test: regular ones by the paper's three numbers, and what the rule says of patterns."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from random import Random

import numpy as np

from tests.running import DOUBLE, SimulatedTree, contributions, tree_schedule
from thalweg.catalog import default_catalog
from thalweg.codes import TREE_ROOT, Allocation, allocate
from thalweg.codes.fractional import FractionalRepetition
from thalweg.engine.tree_node import ElementType
from thalweg.transports import Array

ELEMENTS = 5


def planted(code: str, workers: int, fanout: int, stragglers: int) -> Allocation:
    """Its root lives with worker 0."""
    plant = default_catalog().codes[code].build_tree
    return allocate(plant(range(workers), fanout, stragglers), 0)


def regular(code: str, fanout: int, layers: int, stragglers: int) -> Allocation:
    workers = sum(fanout**layer for layer in range(1, layers + 1))
    return planted(code, workers, fanout, stragglers)


def is_decoded(allocation: Allocation, slow: Collection[int]) -> bool:
    """The rule: a node delivers if it isn't slow and enough of its children deliver. Enough are all
    but s, or, of teams that compute the same, one of each. The root's process is never slow at
    passing things on, only at computing."""
    children, codes = allocation.tree.children, allocation.tree.codes

    def delivers(node: int) -> bool:
        below = children[node]
        there = [child for child in below if delivers(child)]
        if node in slow:
            return False
        if not below:
            return True
        if isinstance(codes[node], FractionalRepetition):
            return {_same_work(allocation, child) for child in there} == {
                _same_work(allocation, child) for child in below
            }
        return len(there) >= len(below) - codes[node].stragglers

    return delivers(TREE_ROOT)


def _same_work(allocation: Allocation, worker: int) -> frozenset[int]:
    return frozenset(allocation.weights[worker])


class Trial:
    """One tree, one set of gradients, any pattern of stragglers."""

    def __init__(self, allocation: Allocation, form: ElementType = DOUBLE, seed: int = 0) -> None:
        self.allocation = allocation
        rng = np.random.default_rng(seed)
        shape = allocation.cells, ELEMENTS
        cells = rng.standard_normal(shape).astype(form.dtype)
        self.total = cells.astype(float).sum(axis=0)
        self.inputs = contributions(allocation, cells)
        schedule = tree_schedule(allocation, ELEMENTS, form.dtype.itemsize)
        self.simulated = SimulatedTree(allocation, schedule, form=form, seed=seed)

    def result(self, slow: Collection[int]) -> Array | None:
        """What all ranks get, to the same bits, or None of them: the slow contribute nothing, and
        get it too."""
        found = self.simulated.run(self.inputs, late=slow)
        arrays = [
            None if results is None else np.concatenate(results.arrays)
            for results in found.values()
        ]
        first = arrays[0]
        if first is None:
            assert all(array is None for array in arrays)
            return None
        assert all(array is not None and (array == first).all() for array in arrays)
        assert all(results is not None and not results.covered for results in found.values())
        return first

    def error(self, result: Array) -> float:
        return float(np.abs(result - self.total).max() / np.abs(self.total).max())


def within_tolerance(allocation: Allocation, draw: Random) -> set[int]:
    """At most s of every parent's children."""
    slow: set[int] = set()
    for node, code in allocation.tree.codes.items():
        below = allocation.tree.children[node]
        slow.update(draw.sample(below, draw.randint(0, code.stragglers)))
    return slow


def drawn(allocation: Allocation, number: int, seed: int = 0) -> Iterator[set[int]]:
    """Patterns within the tolerance and beyond it, by turns."""
    draw = Random(seed)
    for turn in range(number):
        if turn % 2:
            often = draw.choice([0.1, 0.4, 0.7])
            yield {worker for worker in allocation.workers if draw.random() < often}
        else:
            yield within_tolerance(allocation, draw)

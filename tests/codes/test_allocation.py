"""Who computes what: loads that are the paper's, and its worked example point by point."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.codes.trees import planted, regular
from tests.running import tree_schedule
from thalweg.codes import TREE_ROOT, Allocation, CodedTree, allocate
from thalweg.codes.linear import LinearCode
from thalweg.codes.tree import even_children
from thalweg.errors import LayoutError
from thalweg.schedules import check
from thalweg.transports import Array

SMALL = LinearCode(3, 1, np.array([[0.5, 1, 0], [0, 1, -1], [0.5, 0, 1]]))
REGULAR = [
    ("fractional", 4, 2, 1, Fraction(1, 6)),
    ("fractional", 4, 3, 1, Fraction(1, 14)),
    ("fractional", 6, 2, 2, Fraction(1, 6)),
    ("fractional", 6, 2, 1, Fraction(1, 12)),
    ("fractional", 12, 2, 1, Fraction(1, 42)),
    ("fractional", 12, 2, 2, Fraction(1, 20)),
    ("fractional", 12, 2, 3, Fraction(1, 12)),
    ("fractional", 12, 2, 5, Fraction(1, 6)),
    ("fractional", 12, 1, 3, Fraction(1, 3)),
    ("fractional", 5, 2, 0, Fraction(1, 30)),
    ("cyclic", 3, 2, 1, Fraction(4, 15)),
    ("cyclic", 4, 2, 2, Fraction(9, 28)),
    ("cyclic", 4, 3, 1, Fraction(1, 14)),
    ("cyclic", 4, 3, 2, Fraction(27, 148)),
    ("cyclic", 6, 2, 2, Fraction(1, 6)),
    ("cyclic_mds", 4, 2, 1, Fraction(1, 6)),
    ("cyclic_mds", 12, 2, 3, Fraction(1, 12)),
    ("cyclic_mds", 5, 2, 2, Fraction(9, 40)),
]


@pytest.mark.parametrize(("code", "fanout", "layers", "stragglers", "load"), REGULAR)
def test_regular_trees_have_the_load_of_the_paper(
    code: str, fanout: int, layers: int, stragglers: int, load: Fraction
) -> None:
    allocation = regular(code, fanout, layers, stragglers)
    each = Fraction(fanout, stragglers + 1)
    assert load == 1 / sum(each**layer for layer in range(1, layers + 1))
    assert set(allocation.loads.values()) == {load}
    assert allocation.tree.depth == layers
    assert {len(below) for below in allocation.tree.children.values()} == {0, fanout}


def answer(allocation: Allocation, node: int) -> Array:
    """What a node sends, cell by cell, if all its children have answered."""
    below = allocation.tree.children[node]
    own = allocation.cell_weights(node)
    if not below:
        return own
    weights = allocation.tree.codes[node].decode(frozenset(range(len(below))))
    assert weights is not None
    terms = [weight * answer(allocation, below[member]) for member, weight in weights.items()]
    return own + np.sum(terms, axis=0)


@pytest.mark.parametrize(("code", "fanout", "layers", "stragglers", "load"), REGULAR)
def test_what_the_root_decodes_has_every_cell_once(
    code: str, fanout: int, layers: int, stragglers: int, load: Fraction
) -> None:
    allocation = regular(code, fanout, layers, stragglers)
    np.testing.assert_allclose(answer(allocation, TREE_ROOT), 1, atol=1e-9)
    check(tree_schedule(allocation, 3))


def test_a_cell_kept_in_a_layer_has_as_many_copies_as_the_paper_says() -> None:
    """(s+1) to the power of the layer."""
    allocation = regular("fractional", 6, 2, 2)
    copies = dict.fromkeys(range(allocation.cells), 0)
    for own in allocation.weights.values():
        for cell in own:
            copies[cell] += 1
    assert sorted(copies.values()) == [3] * 2 + [9] * 4


def test_the_worked_example() -> None:
    """Three children of each parent, two layers, one straggler, fifteen points, and the code
    [[1/2, 1, 0], [0, 1, -1], [1/2, 0, 1]] at every parent."""
    children = even_children(range(12), 3, 1)
    codes = {node: SMALL for node, below in children.items() if below}
    allocation = allocate(CodedTree(children, codes), 0)
    check(tree_schedule(allocation, 3))
    table = [
        {0: 0.5, 1: 0.5, 5: 1, 6: 1},
        {5: 1, 6: 1, 10: -1, 11: -1},
        {0: 0.5, 1: 0.5, 10: 1, 11: 1},
        {2: 0.25, 3: 0.25, 4: 0.5, 7: 1},
        {4: 0.5, 7: 1, 8: -1, 9: -1},
        {2: 0.25, 3: 0.25, 8: 1, 9: 1},
        {7: 0.5, 8: 0.5, 9: 1, 12: -1},
        {9: 1, 12: -1, 13: 1, 14: 1},
        {7: 0.5, 8: 0.5, 13: -1, 14: -1},
        {2: 0.25, 3: 0.25, 4: 0.5, 12: 1},
        {4: 0.5, 12: 1, 13: -1, 14: -1},
        {2: 0.25, 3: 0.25, 13: 1, 14: 1},
    ]
    for worker, expected in enumerate(table):
        points = {
            point: weight
            for start, stop, weight in allocation.samples(worker, 15)
            for point in range(start, stop)
        }
        assert points == expected


@pytest.mark.parametrize("batch", [14, 28, 100, 101, 127])
def test_every_sample_is_in_the_sum_once(batch: int) -> None:
    """A batch that doesn't divide: cells of whole samples, of nearly their size."""
    allocation = regular("fractional", 4, 3, 1)
    allocation.refuse_batch(batch)
    sizes = [
        sum(stop - start for start, stop, _ in allocation.samples(worker, batch))
        for worker in allocation.workers
    ]
    assert max(sizes) - min(sizes) <= 1
    taken = {
        sample
        for worker in allocation.workers
        for start, stop, _ in allocation.samples(worker, batch)
        for sample in range(start, stop)
    }
    assert taken == set(range(batch))


@pytest.mark.parametrize(
    ("code", "workers", "fanout", "stragglers"),
    [("fractional", 84, 4, 1), ("fractional", 11, 4, 1), ("cyclic", 12, 3, 1), ("cyclic", 5, 5, 2)],
)
def test_a_batch_without_a_sample_for_everybody_is_refused(
    code: str, workers: int, fanout: int, stragglers: int
) -> None:
    """The size that is named is enough."""
    allocation = planted(code, workers, fanout, stragglers)
    with pytest.raises(LayoutError, match=r"a batch of 1 has no sample for worker \d+, which") as e:
        allocation.refuse_batch(1)
    enough = int(e.value.remedy.removeprefix("give a batch of ").removesuffix(" or more"))
    allocation.refuse_batch(enough)
    assert enough <= 60


def test_a_root_of_its_own_computes_nothing() -> None:
    tree = regular("fractional", 4, 2, 1).tree
    moved = CodedTree(
        {
            node + (node != TREE_ROOT): tuple(child + 1 for child in below)
            for node, below in tree.children.items()
        },
        {node + (node != TREE_ROOT): code for node, code in tree.codes.items()},
    )
    allocation = allocate(moved, 0)
    assert 0 not in allocation.workers
    assert allocation.ranks[0] == 0
    assert not allocation.cell_weights(0).any()
    assert allocation.above[1] == 0
    assert allocation.below[0] == (1, 2, 3, 4)
    check(tree_schedule(allocation, 3))

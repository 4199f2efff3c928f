"""Any number of workers: the same guarantee, and loads that are near one another."""

from __future__ import annotations

from itertools import chain, combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codes.trees import Trial, drawn, is_decoded, planted, within_tolerance
from tests.examples import examples
from tests.running import tree_schedule
from thalweg.codes import TREE_ROOT, Allocation
from thalweg.engine.tree_node import ElementType
from thalweg.errors import LayoutError
from thalweg.schedules import check

EXACT = 1e-12
SINGLE = ElementType(np.dtype(np.float32))


def late_at_each_parent(allocation: Allocation, slow: set[int]) -> bool:
    """Whether no parent misses more than it can do without."""
    codes, children = allocation.tree.codes, allocation.tree.children
    return all(len(slow & set(children[node])) <= codes[node].stragglers for node in codes)


@pytest.mark.parametrize("workers", [7, 11])
@pytest.mark.parametrize(
    ("code", "fanout", "stragglers"),
    [
        ("fractional", 4, 1),
        ("fractional", 3, 2),
        ("fractional", 2, 1),
        ("fractional", 7, 2),
        ("cyclic", 3, 1),
        ("cyclic", 4, 2),
    ],
)
def test_every_pattern(workers: int, code: str, fanout: int, stragglers: int) -> None:
    trial = Trial(planted(code, workers, fanout, stragglers))
    check(tree_schedule(trial.allocation, 3))
    sizes = range(workers + 1)
    for slow in chain.from_iterable(combinations(range(workers), size) for size in sizes):
        result = trial.result(slow)
        assert (result is not None) == is_decoded(trial.allocation, slow), slow
        if late_at_each_parent(trial.allocation, set(slow)):
            assert result is not None, slow
        if result is not None:
            assert trial.error(result) < EXACT, slow


@pytest.mark.parametrize(
    ("code", "fanout", "stragglers"),
    [("fractional", 4, 1), ("fractional", 6, 2), ("fractional", 5, 1), ("cyclic", 4, 1)],
)
def test_patterns_of_fifty(code: str, fanout: int, stragglers: int) -> None:
    trial = Trial(planted(code, 50, fanout, stragglers))
    check(tree_schedule(trial.allocation, 3))
    for slow in drawn(trial.allocation, 150):
        result = trial.result(slow)
        assert (result is not None) == is_decoded(trial.allocation, slow), slow
        if late_at_each_parent(trial.allocation, slow):
            assert result is not None, slow
        if result is not None:
            assert trial.error(result) < EXACT, slow


@pytest.mark.parametrize("workers", [7, 11, 50])
@pytest.mark.parametrize(("fanout", "stragglers"), [(4, 1), (4, 0), (2, 1), (6, 2), (8, 3), (5, 1)])
def test_loads_are_near_one_another(workers: int, fanout: int, stragglers: int) -> None:
    loads = planted("fractional", workers, fanout, stragglers).loads.values()
    assert max(loads) <= 1.3 * min(loads)


def test_replicas_of_eleven_give_the_same_bits() -> None:
    trial = Trial(planted("fractional", 11, 4, 1), SINGLE)
    complete = trial.result(())
    assert complete is not None
    for slow in drawn(trial.allocation, 100):
        result = trial.result(slow)
        assert result is None or result.tobytes() == complete.tobytes(), slow


@examples(100)
@given(st.data())
def test_any_number_of_workers(data: st.DataObject) -> None:
    workers = data.draw(st.integers(2, 60), label="workers")
    stragglers = data.draw(st.integers(0, min(3, workers - 1)), label="stragglers")
    fanout = data.draw(st.integers(stragglers + 1, max(stragglers + 1, 12)), label="fanout")
    allocation = planted("fractional", workers, max(2, fanout), stragglers)
    assert sorted(allocation.workers) == list(range(workers))
    loads = allocation.loads.values()
    assert max(loads) <= 1.3 * min(loads)
    for node, code in allocation.tree.codes.items():
        assert len(allocation.tree.children[node]) == code.members > code.stragglers
        assert code.stragglers == stragglers or node != TREE_ROOT
    check(tree_schedule(allocation, 3))
    trial = Trial(allocation)
    draw = Random(data.draw(st.integers(0, 2**32), label="seed"))
    for _ in range(3):
        slow = within_tolerance(allocation, draw)
        result = trial.result(slow)
        assert result is not None, slow
        assert trial.error(result) < EXACT, slow


@examples(60)
@given(
    st.integers(2, 60),
    st.integers(2, 5),
    st.integers(0, 2),
    st.sampled_from(["cyclic", "cyclic_mds"]),
)
def test_any_number_of_workers_with_weights(
    workers: int, fanout: int, stragglers: int, code: str
) -> None:
    """Where such a code can be had at every parent."""
    try:
        allocation = planted(code, workers, fanout, stragglers)
    except LayoutError:
        return
    check(tree_schedule(allocation, 3))
    trial = Trial(allocation)
    for seed in range(3):
        slow = within_tolerance(allocation, Random(seed))
        result = trial.result(slow)
        assert result is not None, slow
        assert trial.error(result) < 1e-13 * max(100, allocation.amplification), slow

"""All patterns of stragglers, or many, through the nodes that training has: a result exactly where
the rule says so, and the right one."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import chain, combinations

import numpy as np
import pytest

from tests.codes.trees import Trial, drawn, is_decoded, regular
from thalweg.engine.tree_node import ElementType

SINGLE = ElementType(np.dtype(np.float32))
EXACT = 1e-12


def test_all_4096_patterns_of_twelve_workers() -> None:
    """Three children of each parent, two layers, one straggler: 640 of them can be decoded."""
    trial = Trial(regular("cyclic", 3, 2, 1))
    assert set(trial.allocation.loads.values()) == {Fraction(4, 15)}
    decoded: Counter[int] = Counter()
    for slow in chain.from_iterable(combinations(range(12), size) for size in range(13)):
        result = trial.result(slow)
        assert (result is not None) == is_decoded(trial.allocation, slow), slow
        if result is not None:
            assert trial.error(result) < EXACT, slow
            decoded[len(slow)] += 1
    assert decoded == {0: 1, 1: 12, 2: 63, 3: 174, 4: 237, 5: 126, 6: 27}


@pytest.mark.parametrize(
    ("code", "fanout", "layers", "stragglers", "load"),
    [
        ("fractional", 4, 2, 1, Fraction(1, 6)),
        ("fractional", 4, 3, 1, Fraction(1, 14)),
        ("fractional", 6, 2, 2, Fraction(1, 6)),
        ("fractional", 12, 2, 1, Fraction(1, 42)),
        ("fractional", 12, 2, 3, Fraction(1, 12)),
        ("cyclic", 4, 3, 1, Fraction(1, 14)),
        ("cyclic", 4, 2, 2, Fraction(9, 28)),
        ("cyclic_mds", 12, 2, 3, Fraction(1, 12)),
        ("cyclic_mds", 6, 2, 1, Fraction(1, 12)),
    ],
)
def test_patterns_of_larger_trees(
    code: str, fanout: int, layers: int, stragglers: int, load: Fraction
) -> None:
    trial = Trial(regular(code, fanout, layers, stragglers))
    assert set(trial.allocation.loads.values()) == {load}
    outcomes: Counter[bool] = Counter()
    for slow in drawn(trial.allocation, 120):
        result = trial.result(slow)
        assert (result is not None) == is_decoded(trial.allocation, slow), slow
        outcomes[result is not None] += 1
        if result is not None:
            assert trial.error(result) < EXACT, slow
    assert min(outcomes[True], outcomes[False]) > 10


@pytest.mark.parametrize(
    ("fanout", "layers", "stragglers"),
    [(4, 1, 1), (4, 2, 1), (4, 3, 1), (6, 2, 2), (12, 2, 1), (12, 2, 3)],
)
def test_replicas_give_the_same_bits_whoever_is_late(
    fanout: int, layers: int, stragglers: int
) -> None:
    trial = Trial(regular("fractional", fanout, layers, stragglers), SINGLE)
    complete = trial.result(())
    assert complete is not None
    assert complete.dtype == np.float32
    given = 0
    for slow in drawn(trial.allocation, 80):
        result = trial.result(slow)
        if result is not None:
            given += 1
            assert result.tobytes() == complete.tobytes(), slow
    assert given >= 40

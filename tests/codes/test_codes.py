"""Every code at one parent: any s may be late, and no wrong sum is ever decoded."""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations, product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg import Cluster, Group, parse_plan
from thalweg.catalog import default_catalog
from thalweg.codes.cyclic import cyclic, matrix
from thalweg.codes.cyclic_mds import cyclic_mds
from thalweg.codes.fractional import FractionalRepetition
from thalweg.codes.linear import LinearCode, amplification
from thalweg.declarations import Code
from thalweg.errors import LayoutError
from thalweg.redundancy import allocation_of
from thalweg.schedules import check_code

CODES: list[Code] = [
    *(FractionalRepetition(n, s) for n, s in [(2, 1), (3, 2), (4, 1), (6, 2), (7, 1), (11, 2)]),
    *(cyclic(n, s) for n, s in [(2, 1), (3, 1), (4, 2), (5, 3), (6, 1), (8, 3), (12, 1), (3, 0)]),
    *(cyclic_mds(n, s) for n, s in [(2, 1), (4, 1), (4, 3), (5, 2), (8, 3), (12, 3), (5, 0)]),
]
LARGE: list[Code] = [FractionalRepetition(84, 7), cyclic(84, 1), cyclic_mds(84, 3)]


def rows(code: Code) -> np.ndarray:
    return np.array([code.row(member) for member in range(code.members)])


def assert_decodes_without(code: Code, late: tuple[int, ...]) -> None:
    weights = code.decode(frozenset(range(code.members)) - set(late))
    assert weights is not None
    assert not set(weights) & set(late)
    total = sum(weight * code.row(member) for member, weight in weights.items())
    np.testing.assert_allclose(total, 1, rtol=0, atol=1e-9)


@pytest.mark.parametrize("code", CODES, ids=repr)
def test_every_set_of_stragglers_decodes_to_the_ones(code: Code) -> None:
    for number in range(code.stragglers + 1):
        for late in combinations(range(code.members), number):
            assert_decodes_without(code, late)
    check_code(code)


@pytest.mark.parametrize("family", default_catalog().codes)
def test_every_family_decodes_to_the_ones(family: str) -> None:
    """Of all sizes that it takes, from its declaration alone."""
    made = 0
    for members, stragglers in product(range(2, 7), range(3)):
        with suppress(LayoutError):
            check_code(default_catalog().codes[family].make(members, stragglers))
            made += 1
    assert made > 5


@pytest.mark.parametrize("code", LARGE, ids=repr)
def test_large_codes_decode_to_the_ones(code: Code) -> None:
    draw = Random(0)
    for _ in range(200):
        assert_decodes_without(code, tuple(draw.sample(range(code.members), code.stragglers)))


@pytest.mark.parametrize("code", CODES, ids=repr)
def test_rows_are_as_light_as_can_be(code: Code) -> None:
    """A block for every s+1 children, or s+1 of n blocks for each: (s+1)/n of the data, where that
    comes out even."""
    held = np.count_nonzero(rows(code), axis=1)
    if isinstance(code, LinearCode):
        assert set(held) == {code.stragglers + 1}
    else:
        assert set(held) == {1}
        assert rows(code).shape[1] == code.members // (code.stragglers + 1)


@pytest.mark.parametrize(("members", "stragglers"), [(4, 1), (6, 2), (7, 1), (8, 3), (11, 2)])
def test_a_team_that_is_gone_can_not_be_decoded(members: int, stragglers: int) -> None:
    code = FractionalRepetition(members, stragglers)
    assert sum(code.teams) == members
    assert min(code.teams) >= stragglers + 1
    for block in range(len(code.teams)):
        team = np.flatnonzero(rows(code)[:, block])
        assert code.decode(frozenset(range(members)) - set(team.tolist())) is None
        for survivor in team.tolist():
            others = frozenset(range(members)) - set(team.tolist())
            assert code.decode(others | {survivor}) is not None


@pytest.mark.parametrize("code", [code for code in CODES if isinstance(code, LinearCode)], ids=repr)
def test_one_too_many_is_not_decoded(code: LinearCode) -> None:
    for late in combinations(range(code.members), code.stragglers + 1):
        arrived = frozenset(range(code.members)) - set(late)
        assert code.decode(arrived) is None
        if code.matrix.min() >= 0:  # of equal weights fewer may do, if they don't overlap
            continue
        least = np.linalg.lstsq(code.matrix[sorted(arrived)].T, np.ones(code.members), rcond=None)
        best = code.matrix[sorted(arrived)].T @ least[0]
        assert np.abs(best - 1).max() > 1e-6, "it could have been"


@given(st.data())
def test_the_small_system_gives_what_least_squares_gives(data: st.DataObject) -> None:
    code = data.draw(st.sampled_from([c for c in CODES if isinstance(c, LinearCode)]))
    late = data.draw(st.sets(st.integers(0, code.members - 1), max_size=code.stragglers))
    arrived = sorted(set(range(code.members)) - late)
    expected = np.linalg.lstsq(code.matrix[arrived].T, np.ones(code.members), rcond=None)[0]
    found = code.decode(frozenset(arrived))
    assert found is not None
    assert list(found) == arrived
    np.testing.assert_allclose(list(found.values()), expected, atol=1e-9)


@pytest.mark.parametrize(("members", "stragglers"), [(3, 1), (5, 2), (12, 3), (42, 1)])
def test_the_random_code_is_its_seed(members: int, stragglers: int) -> None:
    """Every rank draws the same: the best of the draws, found anew or not."""
    again = cyclic.__wrapped__(members, stragglers)
    np.testing.assert_array_equal(cyclic(members, stragglers).matrix, again.matrix)


def test_the_best_draw_is_gentler_than_the_first() -> None:
    first = LinearCode(12, 3, matrix(12, 3, 0))
    assert amplification(cyclic(12, 3)) < amplification(first)
    assert amplification(cyclic_mds(12, 3)) < amplification(cyclic(12, 3))
    assert amplification(FractionalRepetition(12, 3)) == 1


def test_the_row_of_the_literature() -> None:
    """(1, 1 + sqrt 3, 1 + sqrt 3, 1) for twelve children and three stragglers."""
    root = 1 + 3**0.5
    np.testing.assert_allclose(cyclic_mds(12, 3).row(0)[:4], [1, root, root, 1])
    np.testing.assert_allclose(np.abs(cyclic_mds(12, 1).row(0)[:2]), [1, 1])


@pytest.mark.parametrize(("members", "stragglers"), [(4, 2), (6, 2), (7, 3), (12, 4), (3, 1)])
def test_real_weights_take_an_odd_difference(members: int, stragglers: int) -> None:
    with pytest.raises(LayoutError) as caught:
        cyclic_mds(members, stragglers)
    assert "their difference must be odd" in caught.value.problem
    other = stragglers - 1 or stragglers + 1
    assert caught.value.remedy == f"use stragglers={other}, code=fractional or code=cyclic"
    cyclic_mds(members, other)
    cyclic(members, stragglers)
    FractionalRepetition(members, stragglers)


@pytest.mark.parametrize(
    ("plan", "workers"),
    [
        ("gc(stragglers=3, code=cyclic)", 42),
        ("gc(stragglers=7, code=cyclic_mds)", 84),
        ("codedreduce(fanout=12, stragglers=3, code=cyclic)", 156),
    ],
)
def test_a_code_that_float32_can_not_bear_is_refused(plan: str, workers: int) -> None:
    group = Group.everybody(Cluster.flat(workers))
    with pytest.raises(LayoutError, match=r"amplify rounding errors .*; use code=fractional"):
        allocation_of(parse_plan(plan), group)
    allocation_of(
        parse_plan(plan.replace("cyclic_mds", "cyclic").replace("cyclic", "fractional")), group
    )

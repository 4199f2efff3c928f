"""Waiting for who is late, against every combination, counted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import comb, exp, log, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.predict.coded_forms import ShiftedExponential, binomial, chance_of_more, harmonic
from thalweg.facts import Duration, StragglerDelay
from thalweg.predict.straggler_recurrence import expected_latest


def late(probability: float, seconds: float) -> StragglerDelay:
    return StragglerDelay(probability=probability, delay=Duration(seconds))


def counted(hosts: Sequence[StragglerDelay]) -> float:
    """Over all sets of hosts that may be late."""
    expected = 0.0
    for which in product([False, True], repeat=len(hosts)):
        pairs = list(zip(hosts, which, strict=True))
        chance = prod(h.probability if is_late else 1 - h.probability for h, is_late in pairs)
        expected += chance * max(h.delay.seconds if is_late else 0.0 for h, is_late in pairs)
    return expected


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.05, 0.3, 0.3, 1.0]), st.sampled_from([0.0, 0.5, 2, 7])),
        min_size=1,
        max_size=6,
    )
)
@examples(60)
def test_hosts_that_differ(pairs: list[tuple[float, float]]) -> None:
    hosts = [late(*pair) for pair in pairs]
    assert expected_latest(hosts) == pytest.approx(counted(hosts), abs=1e-12)


def test_a_hundred_thousand_hosts() -> None:
    """All are there at once with (1-p)^N; without one of them N p (1-p)^(N-1) more."""
    n, p = 100_000, 1e-5
    hosts = [late(p, 2.0)] * n
    none = exp(n * log(1 - p))
    one = n * p * exp((n - 1) * log(1 - p))
    assert expected_latest(hosts) == pytest.approx(2 * (1 - none), rel=1e-9)
    assert chance_of_more([p] * n, 1) == pytest.approx(1 - none - one, rel=1e-9)


def test_binomial_by_hand() -> None:
    assert binomial(4, 0.3) == pytest.approx(
        [comb(4, k) * 0.3**k * 0.7 ** (4 - k) for k in range(5)]
    )
    assert binomial(100_000, 0.5).sum() == pytest.approx(1, abs=1e-8)
    assert binomial(3, 1.0).tolist() == [0, 0, 0, 1]


def test_shifted_exponentials() -> None:
    """The least of n tails has mean 1/n of one, and each further one 1/(n-1), ..."""
    one = ShiftedExponential(3.0, 2.0)
    assert one.expected_latest(3) == pytest.approx(3 + 2 * (1 / 3 + 1 / 2 + 1))
    assert one.expected_arrival(3, 1) == pytest.approx(3 + 2 / 3)
    assert one.expected_arrival(3, 2) == pytest.approx(3 + 2 * (1 / 3 + 1 / 2))
    assert one.times(2) == ShiftedExponential(6.0, 4.0)
    assert one.by(2.9) == 0
    assert one.by(5.0) == pytest.approx(1 - exp(-1))


def test_the_series_goes_on_where_the_sum_ends() -> None:
    assert harmonic(10_001) - harmonic(10_000) == pytest.approx(1 / 10_001, rel=1e-9)

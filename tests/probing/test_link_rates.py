"""NICs, uplinks, and the rate of one flow."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.probing.simulated import Simulated
from tests.probing.test_latency import SIZES, wanted
from thalweg.facts import Cluster, Duplex, Rate
from thalweg.probing.flow import rate_of
from thalweg.probing.link_rates import (
    NIC_ROUND_COUNT,
    measure_nics,
    measure_uplinks,
    round_robin,
)

MBIT = 1e6


def test_a_slow_host_and_one_that_is_slow_one_way_only() -> None:
    one_way = Duplex(Rate.parse("100mbit"), Rate.parse("30mbit"))
    nics = ["100mbit", "25mbit", one_way, "100mbit", "100mbit", "100mbit"]
    cluster = Cluster.regular([2, 2, 2], nic=nics, uplink="100mbit")
    found = measure_nics(Simulated(cluster), wanted(cluster))
    for host in cluster.hosts:
        [rank] = host.ranks
        assert found.out[rank] == pytest.approx(host.nic.out.bits_per_second, rel=0.03)
        assert found.into[rank] == pytest.approx(host.nic.into.bits_per_second, rel=0.03)


@given(sizes=SIZES, factor=st.sampled_from([0.5, 1.0, 1.5]))
def test_uplinks_that_limit_are_measured(sizes: list[int], factor: float) -> None:
    cluster = Cluster.regular(sizes, nic="100mbit", uplink=Rate(factor * 100 * MBIT))
    network, racks = Simulated(cluster), wanted(cluster)
    for uplink in measure_uplinks(network, racks, measure_nics(network, racks)):
        assert uplink is not None
        assert uplink.out_full
        assert uplink.into_full
        for rate in (uplink.out, uplink.into):
            assert rate == pytest.approx(factor * 100 * MBIT, rel=0.05)


def test_four_flows_find_what_two_cannot() -> None:
    cluster = Cluster.regular([4, 4, 4], nic="100mbit", uplink=["200mbit", "1gbit", "250mbit"])
    network, racks = Simulated(cluster), wanted(cluster)
    first, second, third = measure_uplinks(network, racks, measure_nics(network, racks))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.out_full
    assert first.out == pytest.approx(200 * MBIT, rel=0.03)
    assert not second.limits
    assert second.out == pytest.approx(400 * MBIT, rel=0.03)
    assert third.into == pytest.approx(250 * MBIT, rel=0.03)


def test_one_rack_has_no_uplink_to_measure() -> None:
    cluster = Cluster.regular([4], nic="100mbit")
    network, racks = Simulated(cluster), wanted(cluster)
    assert measure_uplinks(network, racks, measure_nics(network, racks)) == [None]


@given(st.integers(1, 12))
def test_round_robin_pairs_differ_and_rounds_are_matchings(number: int) -> None:
    pairs = list(round_robin(range(number)))
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    a_round = number // 2
    for start in range(0, len(pairs), max(1, a_round)):
        together = [host for pair in pairs[start : start + a_round] for host in pair]
        assert len(together) == len(set(together))
    rounds = min(NIC_ROUND_COUNT, number - 1 + number % 2)
    assert len(pairs) == rounds * a_round
    for one, other in combinations(pairs, 2):
        assert {*one} != {*other}


def arrivals(mbit: float, seconds: float, nbytes: int = 1 << 15) -> list[tuple[float, int]]:
    apart = 8 * nbytes / (mbit * MBIT)
    return [(apart * (i + 1), nbytes) for i in range(max(16, int(seconds / apart)))]


@given(mbit=st.floats(0.5, 20_000), seconds=st.sampled_from([0.3, 0.5]))
def test_a_steady_flow_has_its_rate(mbit: float, seconds: float) -> None:
    assert rate_of(arrivals(mbit, seconds), seconds) == pytest.approx(mbit * MBIT, rel=0.02)


def test_a_burst_at_the_beginning_does_not_count() -> None:
    burst = [(0.001, 1 << 15)] * 4
    flow = [*burst, *arrivals(50, 0.5)]
    assert rate_of(flow, 0.5) == pytest.approx(50 * MBIT, rel=0.05)


@pytest.mark.parametrize("stall", [0.1, 0.2, 0.3])
def test_a_stall_that_is_caught_up_with_changes_little(stall: float) -> None:
    flow = [
        (stall + 0.06 if stall < when < stall + 0.06 else when, nbytes)
        for when, nbytes in arrivals(100, 0.5)
    ]
    assert rate_of(flow, 0.5) == pytest.approx(100 * MBIT, rel=0.1)

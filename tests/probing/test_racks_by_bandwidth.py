"""Racks by rates, on simulated networks: flows share links fairly, and figures are 2 % off."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.probing.simulated import Simulated
from tests.probing.test_latency import SIZES, wanted
from thalweg.facts import Cluster, Duplex, Rate
from thalweg.probing.coordinator import ProbeFlow
from thalweg.probing.link_rates import in_rounds
from thalweg.probing.racks_by_bandwidth import ContentionProbe, UplinkSharing, racks_by_rates


def inferred(cluster: Cluster, seed: int, at_once: int = 6) -> tuple[UplinkSharing, Simulated]:
    network = Simulated(cluster, seed=seed, at_once=at_once)
    return racks_by_rates(ContentionProbe(network, Random(seed))), network


def in_seats(cluster: Cluster, slow: int, rate: str) -> list[str]:
    """NICs in the order of the seats, such that this rank has another rate."""
    return [rate if rank == slow else "100mbit" for rack in cluster.racks for rank in rack.ranks]


@examples(60)
@given(
    sizes=SIZES,
    uplink=st.sampled_from(["50mbit", "100mbit", "140mbit"]),
    interleaved=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_shared_uplinks_tell(sizes: list[int], uplink: str, interleaved: bool, seed: int) -> None:
    """In two of three probes at least: one in a thousand draws the wrong flows."""
    cluster = Cluster.regular(sizes, nic="100mbit", uplink=uplink, interleaved=interleaved)
    probes = [inferred(cluster, seed + 10_001 * number) for number in range(3)]
    right = [
        network for found, network in probes if found.racks == wanted(cluster) and found.checks
    ]
    assert len(right) >= 2
    assert all(network.tests < 150 + 3 * cluster.workers * len(sizes) for network in right)


def test_four_racks_of_four_take_about_n_times_c_tests() -> None:
    cluster = Cluster.regular([4] * 4, nic="100mbit", uplink="100mbit", interleaved=True)
    for seed in range(10):
        assert inferred(cluster, seed)[1].tests < 130


@pytest.mark.parametrize("sizes", [[4, 4], [4, 4, 4, 4], [5, 3, 4]])
@pytest.mark.parametrize("slow", [0, 3, 5])
def test_a_slow_host_is_found_in_its_rack(sizes: list[int], slow: int) -> None:
    even = Cluster.regular(sizes, nic="100mbit", uplink="100mbit", interleaved=True)
    cluster = Cluster.regular(
        sizes, nic=in_seats(even, slow, "25mbit"), uplink="100mbit", interleaved=True
    )
    found, _ = inferred(cluster, slow)
    assert found.racks == wanted(cluster)


@given(workers=st.integers(4, 12), seed=st.integers(0, 999))
@examples(20)
def test_where_nothing_contends_nothing_is_told(workers: int, seed: int) -> None:
    for sizes, uplink in (([workers], "100mbit"), ([2, workers], None)):
        found, _ = inferred(Cluster.regular(sizes, nic="100mbit", uplink=uplink), seed)
        assert found == UplinkSharing(racks=[])


def test_many_flows_that_contend_where_no_two_do_are_told_of() -> None:
    cluster = Cluster.regular([8, 8], nic="100mbit", uplink="200mbit")
    found, _ = inferred(cluster, 1, at_once=8)
    assert found.racks == []
    assert found.crowded


def test_contention_on_the_way_in_alone_tells_as_well() -> None:
    narrow = Duplex(Rate.parse("1gbit"), Rate.parse("100mbit"))
    cluster = Cluster.regular([4, 3, 4], nic="100mbit", uplink=narrow, interleaved=True)
    for seed in range(10):
        assert inferred(cluster, seed)[0].racks == wanted(cluster)


def test_one_limited_rack_among_others() -> None:
    """The others never limit each other, so they count as one."""
    cluster = Cluster.regular([4, 4, 4], nic="100mbit", uplink=["100mbit", "10gbit", "10gbit"])
    for seed in range(10):
        found, _ = inferred(cluster, seed)
        assert found.racks == [frozenset(range(4)), frozenset(range(4, 12))]


def test_hosts_that_share_with_nobody_are_said_to_be_loose() -> None:
    cluster = Cluster.regular([3, 3, 1, 1], nic="100mbit", uplink="100mbit")
    for seed in range(10):
        found, _ = inferred(cluster, seed)
        assert found.racks[:2] == [frozenset({0, 1, 2}), frozenset({3, 4, 5})]
        assert found.loose == found.racks[2] == frozenset({6, 7})


def test_rounds_have_every_host_once() -> None:
    flows = [ProbeFlow(0, 1), ProbeFlow(1, 2), ProbeFlow(2, 3), ProbeFlow(4, 5), ProbeFlow(3, 0)]
    rounds = in_rounds(flows, 2)
    assert sorted(flow for together in rounds for flow in together) == sorted(flows)
    for together in rounds:
        assert len(together) <= 2
        assert len({host for flow in together for host in flow}) == 2 * len(together)

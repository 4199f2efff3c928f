"""Racks by latency, on simulated networks."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.probing.simulated import Simulated
from thalweg.facts import Cluster
from thalweg.probing.racks import racks_by_latency, widest_gap
from thalweg.probing.result import added_by_uplinks

SIZES = st.lists(st.integers(2, 5), min_size=2, max_size=5)


def wanted(cluster: Cluster) -> list[frozenset[int]]:
    return sorted((frozenset(rack.ranks) for rack in cluster.racks), key=min)


@given(sizes=SIZES, interleaved=st.booleans(), seed=st.integers(0, 99))
def test_a_clear_gap_tells_with_few_round_trips(
    sizes: list[int], interleaved: bool, seed: int
) -> None:
    cluster = Cluster.regular(sizes, interleaved=interleaved)
    network = Simulated(cluster, hop=60e-6, jitter=0.1, seed=seed)
    found = racks_by_latency(network, Random(seed))
    assert found.racks is not None
    assert sorted(found.racks, key=min) == wanted(cluster)
    assert found.ratio > 1.15
    assert network.pings <= 2 * cluster.workers * len(sizes) + 6 * len(sizes)


@given(sizes=SIZES, seed=st.integers(0, 999), jitter=st.sampled_from([0.1, 0.3, 0.6]))
def test_noise_does_not_tell(sizes: list[int], seed: int, jitter: float) -> None:
    network = Simulated(Cluster.regular(sizes), hop=0.0, jitter=jitter, seed=seed)
    assert racks_by_latency(network, Random(seed)).racks is None


def test_gaps_too_narrow_are_none() -> None:
    assert widest_gap([]) is None
    assert widest_gap([1.0]) is None
    assert widest_gap([1.0, 1.05, 1.1]) is None
    border = widest_gap([1.0, 1.1, 4.0, 4.2])
    assert border is not None
    assert 1.1 < border < 4.0


def test_what_each_uplink_adds() -> None:
    """Ways of 50 us within racks; uplinks that add 0.1, 1 and 5 ms."""
    racks = [frozenset({0, 1}), frozenset({2, 3}), frozenset({4, 5})]
    adds = [1e-4, 1e-3, 5e-3]
    rack_of = {host: number for number, rack in enumerate(racks) for host in rack}
    trips = {}
    for one in range(6):
        for other in range(one + 1, 6):
            i, j = rack_of[one], rack_of[other]
            trips[one, other] = 2 * (5e-5 + (adds[i] + adds[j] if i != j else 0.0))
    within, added = added_by_uplinks(racks, trips)
    assert abs(within - 5e-5) < 1e-9
    assert all(abs(found - real) < 1e-9 for found, real in zip(added, adds, strict=True))

"""How finely data is cut follows from latency and rate."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.facts import Cluster, Duration
from thalweg.schedules import Group
from thalweg.schedules.chunks import pieces, split


@given(elements=st.integers(0, 10_000), parts=st.integers(1, 100))
def test_split_is_even_and_complete(elements: int, parts: int) -> None:
    sizes = split(elements, parts)
    assert len(sizes) == parts
    assert sum(sizes) == elements
    assert max(sizes) - min(sizes) <= 1


def group(nic: str, latency: str) -> Group:
    cluster = Cluster.regular([4, 4], nic=nic, latency=Duration.parse(latency))
    return Group.everybody(cluster)


def pipeline_seconds(k: int, hops: int, transfer: float, latency: float) -> float:
    return (k + hops - 1) * (latency + transfer / k)


@pytest.mark.parametrize("hops", [2, 6, 20])
@pytest.mark.parametrize("nbytes", [10_000, 1_000_000, 100_000_000])
@pytest.mark.parametrize(("nic", "latency"), [("1gbit", "100us"), ("100mbit", "1ms")])
def test_pieces_are_near_the_best_number(hops: int, nbytes: int, nic: str, latency: str) -> None:
    """Within 2 % of the best of all numbers of pieces in the pipeline's formula."""
    place = group(nic, latency)
    seconds = Duration.parse(latency).seconds
    transfer = nbytes / place.slowest_bytes_per_second()
    chosen = pieces(place, nbytes, hops)
    limit = max(1, int(transfer / seconds))  # no piece shorter than its latency
    near = range(1, min(limit, 4 * int(sqrt(hops * transfer / seconds)) + 2) + 1)
    best = min(pipeline_seconds(k, hops, transfer, seconds) for k in near)
    assert pipeline_seconds(chosen, hops, transfer, seconds) <= 1.02 * best


def test_slower_links_and_longer_ways_want_more_pieces_and_latency_fewer() -> None:
    usual = pieces(group("1gbit", "100us"), 1_000_000, 6)
    assert pieces(group("100mbit", "100us"), 1_000_000, 6) > usual
    assert pieces(group("1gbit", "100us"), 1_000_000, 20) > usual
    assert pieces(group("1gbit", "1ms"), 1_000_000, 6) < usual
    assert pieces(group("1gbit", "100us"), 100, 6) == 1


def test_the_slowest_link_is_an_uplink_only_if_there_are_two_racks() -> None:
    cluster = Cluster.regular([2, 2], nic="1gbit", uplink="100mbit")
    assert Group((0, 1), cluster).slowest_bytes_per_second() == 125_000_000
    assert Group((0, 2), cluster).slowest_bytes_per_second() == 12_500_000

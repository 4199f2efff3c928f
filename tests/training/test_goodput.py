"""Who is slow is found from what links gave in the meetings of the real table, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from thalweg.engine.arrivals import Arrival
from thalweg.engine.execute import Leading
from thalweg.facts import Cluster
from thalweg.schedules import ContendedLinks, Group, contended_links
from thalweg.schedules.topologies import shuffle
from thalweg.training.contention_monitor import (
    RATE_WINDOW_TURNS,
    LinkRateEstimator,
    RateSample,
    goodput,
)

USUAL = 12.5e6


def arrival(step: int, bucket: int, leading: dict[int, Leading]) -> Arrival:
    return Arrival(step=step, bucket=bucket, ready=0, started=0, ended=9, peers={}, leading=leading)


def test_the_rate_is_of_what_came_after_the_first_message() -> None:
    seen = goodput(3, [arrival(7, 0, {1: Leading(10.0, 10.5, 1000)})])
    assert seen == [RateSample(7, 1, 3, 2000.0)]


def test_buckets_that_share_a_link_count_together() -> None:
    rounds = [arrival(7, b, {1: Leading(10.0 + b / 4, 10.5 + b / 2, 1000)}) for b in range(3)]
    assert goodput(3, rounds) == [RateSample(7, 1, 3, 2000.0)]  # 2,000 bytes from 10.0 to 11.0


def test_what_comes_at_once_is_fast_enough() -> None:
    seen = goodput(3, [arrival(7, 0, {1: Leading(10.0, 10.0001, 1000)})])
    assert seen == [RateSample(7, 1, 3, 1000 / 0.005)]


def test_one_message_has_no_rate() -> None:
    assert goodput(3, [arrival(7, 0, {1: Leading(10.0, 10.0, 0)})]) == []


def neighbours(meeting: tuple[int, ...], step: int) -> list[tuple[int, int]]:
    """Who sends to whom in a ring, which goes the other way at every second step."""
    order = meeting[:: -1 if step % 2 else 1]
    return [(order[i - 1], order[i]) for i in range(len(order))]


def watched(
    group: Group, slow: dict[tuple[str, str], float], steps: range, noise: float, seed: int = 0
) -> LinkRateEstimator:
    """The links after these steps; `slow` ways have a part of the usual rate, by owner and way."""
    links = LinkRateEstimator(group, group.contended)
    for one in rates_of(group, slow, steps, noise, seed):
        links.add(one)
    return links


def rates_of(
    group: Group, slow: dict[tuple[str, str], float], steps: range, noise: float, seed: int
) -> Iterator[RateSample]:
    draw = np.random.default_rng(seed)
    cluster = group.cluster
    for step in steps:
        for averaging_group in shuffle.groups(group, step):
            for source, target in neighbours(averaging_group.group.order, step):
                ways = [(cluster.host(source).name, "out"), (cluster.host(target).name, "in")]
                here, there = cluster.rack(source), cluster.rack(target)
                if here is not there:
                    ways += [(here.name, "out"), (there.name, "in")]
                part = min(slow.get(way, 1.0) for way in ways)
                yield RateSample(step, source, target, USUAL * part * draw.uniform(1 - noise, 1))


def both(name: str, part: float) -> dict[tuple[str, str], float]:
    return {(name, "out"): part, (name, "in"): part}


def named(links: LinkRateEstimator, group: Group) -> ContendedLinks:
    """As the leader of a run judges, who knows which table it has."""
    rates = links.rates()
    assert rates is not None
    return contended_links(group, rates, adopted=group.contended)


@pytest.mark.parametrize("sizes", [[4] * 4, [5, 3, 4], [3, 3, 3], [8, 8], [2, 6, 4]])
@pytest.mark.parametrize("ways", [("out", "in"), ("out",), ("in",)])
def test_a_slow_host_is_named_and_nobody_else(sizes: list[int], ways: tuple[str, ...]) -> None:
    group = Group.everybody(Cluster.regular(sizes))
    for rank in group.ranks:
        name = group.cluster.host(rank).name
        slow = {(name, way): 0.25 for way in ways}
        found = named(watched(group, slow, range(RATE_WINDOW_TURNS + 4), noise=0.2), group)
        assert [host for host, _ in found.hosts] == [name]
        assert found.racks == ()


@pytest.mark.parametrize("sizes", [[4] * 4, [5, 3, 4], [3] * 5])
@pytest.mark.parametrize("ways", [("out", "in"), ("out",), ("in",)])
def test_a_slow_rack_is_named_and_nobody_else(sizes: list[int], ways: tuple[str, ...]) -> None:
    group = Group.everybody(Cluster.regular(sizes))
    for rack in group.cluster.racks:
        slow = {(rack.name, way): 0.25 for way in ways}
        found = named(watched(group, slow, range(RATE_WINDOW_TURNS + 4), noise=0.2), group)
        assert [name for name, _ in found.racks] == [rack.name]
        assert found.hosts == ()


@examples(30)
@given(seed=st.integers(0, 1000), start=st.integers(0, 50))
def test_nobody_is_named_where_nothing_is_slow(seed: int, start: int) -> None:
    group = Group.everybody(Cluster.regular([4] * 4))
    links = watched(group, {}, range(start, start + RATE_WINDOW_TURNS + 4), noise=0.35, seed=seed)
    assert not named(links, group)


@examples(30)
@given(seed=st.integers(0, 1000), host=st.integers(4, 15))
def test_a_slow_rack_and_a_slow_host_at_once(seed: int, host: int) -> None:
    """The three other racks stay together: they take as long as those inside, and are seen with at
    least 0.8 of the rate, so at most 1.25 of a usual step."""
    group = Group.everybody(Cluster.regular([4] * 4))
    slow = both("rack0", 0.25) | both(f"host{host}", 0.25)
    found = named(watched(group, slow, range(8), noise=0.2, seed=seed), group)
    assert found == ContendedLinks(racks=(("rack0", 4),), hosts=((f"host{host}", 4),))


def test_what_is_kept_apart_is_still_seen() -> None:
    """In its windows; and so it is seen when it has recovered."""
    even = Cluster.regular([4] * 4)
    apart = ContendedLinks(racks=(("rack0", 4),), hosts=(("host5", 8),))
    group = Group(tuple(range(16)), even, apart)
    still = named(watched(group, both("rack0", 0.25) | both("host5", 0.1), range(64), 0.1), group)
    assert still == apart
    assert not named(watched(group, {}, range(64), 0.1), group)


def test_two_racks_cannot_be_distinguished() -> None:
    """Whatever crosses one uplink crosses the other: both are named, and the table is the same."""
    group = Group.everybody(Cluster.regular([4, 4]))
    found = named(watched(group, both("rack0", 0.25), range(8), noise=0.1), group)
    assert [name for name, _ in found.racks] == ["rack0", "rack1"]


def test_a_partner_of_the_slow_is_not_slow() -> None:
    """In a rack of four with a slow uplink and a slow host, everybody else only ever meets that
    host, or goes through that uplink."""
    even = Cluster.regular([4] * 4)
    apart = ContendedLinks(racks=(("rack0", 4),), hosts=(("host1", 4),))
    group = Group(tuple(range(16)), even, apart)
    links = LinkRateEstimator(group, apart)
    for rank in group.ranks:
        for target in group.ranks:
            links.add(RateSample(0, rank, target, USUAL))
    slow = both("rack0", 0.25) | both("host1", 0.25)
    for one in rates_of(group, slow, range(96), 0.1, 0):
        links.add(one)
    assert named(links, group) == apart

"""Closed forms against replays, on even clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.predict.closed_form.test_topologies import FORMS
from tests.schedules.test_topologies import build
from thalweg.facts import Cluster, Duration
from thalweg.facts.machine import FittedValue, TransportCosts
from thalweg.predict.flow_simulator import FREE_TRANSPORT_COSTS, simulate
from thalweg.schedules import Group, Schedule
from thalweg.schedules.closed_form import Cost, Symbols
from thalweg.schedules.topologies.halving_doubling import halving_doubling_cost
from thalweg.schedules.topologies.hierarchical import hierarchical_cost
from thalweg.schedules.topologies.ring import ring_cost

EVEN = [(1, 2), (1, 8), (2, 4), (3, 5), (6, 3)]
POWERS = [(1, 2), (1, 8), (2, 2), (2, 4), (4, 4)]


def cluster_of(racks: int, members: int, *, uplink: str = "1gbit", latency: str) -> Cluster:
    return Cluster.regular(
        [members] * racks, nic="1gbit", uplink=uplink, latency=Duration.parse(latency)
    )


def made(variant: str, cluster: Cluster, elements_each: int) -> tuple[Schedule, Symbols]:
    group = Group.everybody(cluster)
    schedule = build(variant, group, elements_each * group.size)
    return schedule, Symbols.of(group, schedule.elements * schedule.itemsize)


def last(
    schedule: Schedule, cluster: Cluster, costs: TransportCosts = FREE_TRANSPORT_COSTS
) -> float:
    return max(simulate(schedule, cluster, costs).values())


@pytest.mark.parametrize(("racks", "members"), EVEN)
@pytest.mark.parametrize(("uplink", "latency"), [("1gbit", "1ms"), ("300mbit", "0s")])
def test_a_ring(racks: int, members: int, uplink: str, latency: str) -> None:
    cluster = cluster_of(racks, members, uplink=uplink, latency=latency)
    schedule, x = made("ring", cluster, 1000)
    assert last(schedule, cluster) == pytest.approx(ring_cost(x).seconds, rel=1e-6)


@pytest.mark.parametrize("racks", [2, 3, 6])
def test_a_ring_of_long_latencies_pays_slow_links_only_where_it_crosses_them(racks: int) -> None:
    """The form has every hop as slow as the slowest. A chunk makes 2(N-1) of them, and the one that
    starts across an uplink crosses one at every third."""
    cluster = cluster_of(racks, 3, uplink="300mbit", latency="10ms")
    schedule, x = made("ring", cluster, 1000)
    hops = 2 * (3 * racks - 1)
    crossings = -(-hops // 3)
    by_hand = hops * 10e-3 + crossings * 4000 * 8 / 300e6 + (hops - crossings) * 4000 * 8 / 1e9
    assert last(schedule, cluster) == pytest.approx(by_hand, rel=1e-6)
    assert by_hand < ring_cost(x).seconds


@pytest.mark.parametrize(("racks", "members"), [(1, 84), (6, 14)])
def test_pieces_hide_a_large_rings_latencies(racks: int, members: int) -> None:
    """While one piece travels another leaves: the busiest link works all the time, but for the
    first and the last latency."""
    cluster = cluster_of(racks, members, uplink="300mbit", latency="100us")
    schedule, x = made("ring", cluster, 12_500)
    assert len(schedule.sizes) > 84
    assert last(schedule, cluster) == pytest.approx(ring_cost(x).transfer + 100e-6, rel=1e-3)


@pytest.mark.slow
def test_a_ring_of_a_thousand() -> None:
    cluster = cluster_of(1, 1024, latency="1ms")
    schedule, x = made("ring", cluster, 100)
    assert last(schedule, cluster) == pytest.approx(ring_cost(x).seconds, rel=1e-6)


@pytest.mark.parametrize(("racks", "members"), POWERS)
@pytest.mark.parametrize("uplink", ["1gbit", "250mbit"])
@pytest.mark.parametrize("latency", ["1us", "10ms"])
def test_halving_and_doubling(racks: int, members: int, uplink: str, latency: str) -> None:
    cluster = cluster_of(racks, members, uplink=uplink, latency=latency)
    schedule, x = made("halving_doubling", cluster, 1000)
    assert last(schedule, cluster) == pytest.approx(halving_doubling_cost(x).seconds, rel=1e-6)


@pytest.mark.parametrize(("racks", "members"), POWERS)
def test_a_hierarchy_in_one_slab(racks: int, members: int) -> None:
    cluster = cluster_of(racks, members, latency="10ms")
    schedule, x = made("hierarchical", cluster, 1000)
    assert last(schedule, cluster) == pytest.approx(hierarchical_cost(x).seconds, rel=1e-6)


def chunks(variant: str, schedule: Schedule, x: Symbols) -> int:
    """That each of what is synchronised at once is cut into."""
    parts = {"ps": x.N, "ps(servers=half)": (x.N + 1) // 2, "double_tree": 2}
    return 1 if variant == "gossip" else len(schedule.sizes) // parts.get(variant, 1)


@pytest.mark.parametrize(("racks", "members"), POWERS)
@pytest.mark.parametrize("uplink", ["1gbit", "250mbit"])
@pytest.mark.parametrize(
    ("variant", "near"),
    [
        ("gossip", 1e-3),
        ("star", 0.03),
        ("ps", 0.03),
        ("ps(servers=1)", 0.03),
        ("tree", 0.05),
        ("tree(fanout=1)", 0.05),
        ("tree(fanout=4)", 0.05),
    ],
)
def test_bytes(racks: int, members: int, uplink: str, variant: str, near: float) -> None:
    """Almost no latency. Forms of several chunks have the first one go through all phases alone,
    and the pipeline drain after the last: a chunk or two more than it takes."""
    cluster = cluster_of(racks, members, uplink=uplink, latency="1us")
    schedule, x = made(variant, cluster, 27_720)
    form: Cost = FORMS[variant](replace(x, k=chunks(variant, schedule, x)))
    assert last(schedule, cluster) == pytest.approx(form.seconds, rel=near)


@pytest.mark.parametrize(("racks", "members"), POWERS)
@pytest.mark.parametrize("variant", ["star", "ps"])
def test_a_masters_messages(racks: int, members: int, variant: str) -> None:
    """Messages of many travel at the same time. The forms' 2(N-1) alpha are what handling them
    takes: N-1 at each server, and as many of the results at each rank if all are servers; from one
    master everybody has one."""
    cluster = cluster_of(racks, members, latency="1ms")
    schedule, x = made(variant, cluster, 1)
    found = last(schedule, cluster, TransportCosts(message=FittedValue(1.0)))
    results = 1 if variant == "star" else x.N - 1
    assert found == pytest.approx(x.N - 1 + results, abs=0.01)

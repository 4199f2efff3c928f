"""Schedules replayed on links: against closed forms, and small cases worked out by hand."""

from __future__ import annotations

import pytest

from tests.schedules.test_topologies import build
from thalweg.facts import Cluster, Duration
from thalweg.predict import closed_forms as forms
from thalweg.predict.flows import simulate
from thalweg.predict.symbols import Symbols
from thalweg.schedules import Group

EVEN = [(1, 2), (1, 8), (2, 4), (3, 5), (6, 3)]


def cluster_of(racks: int, members: int, *, uplink: str, latency: str) -> Cluster:
    return Cluster.regular(
        [members] * racks, nic="1gbit", uplink=uplink, latency=Duration.parse(latency)
    )


def ring_seconds(cluster: Cluster) -> tuple[float, float]:
    """As replayed, and as the form has it; in parts that aren't worth cutting further."""
    group = Group.everybody(cluster)
    schedule = build("ring", group, 1000 * group.size)
    said = forms.ring(Symbols.of(group, 4000 * group.size)).seconds
    return max(simulate(schedule, cluster).values()), said


@pytest.mark.parametrize(("racks", "members"), EVEN)
@pytest.mark.parametrize(("uplink", "latency"), [("1gbit", "1ms"), ("300mbit", "0s")])
def test_a_ring_takes_what_its_form_says(
    racks: int, members: int, uplink: str, latency: str
) -> None:
    found, said = ring_seconds(cluster_of(racks, members, uplink=uplink, latency=latency))
    assert found == pytest.approx(said, rel=1e-6)


@pytest.mark.parametrize("racks", [2, 3, 6])
def test_a_ring_of_long_latencies_pays_its_slow_links_only_where_it_crosses_them(
    racks: int,
) -> None:
    """The form has every hop as slow as the slowest. A chunk makes 2(N-1) of them, and the one that
    starts across an uplink crosses one at every third."""
    found, said = ring_seconds(cluster_of(racks, 3, uplink="300mbit", latency="10ms"))
    hops = 2 * (3 * racks - 1)
    crossings = -(-hops // 3)
    by_hand = hops * 10e-3 + crossings * 4000 * 8 / 300e6 + (hops - crossings) * 4000 * 8 / 1e9
    assert found == pytest.approx(by_hand, rel=1e-6)
    assert found < said

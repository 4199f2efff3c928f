"""Bytes that leave the busiest rack, a step."""

from __future__ import annotations

import pytest

from thalweg.catalog import default_catalog
from thalweg.facts import Cluster
from thalweg.predict.mixing import mixing_of, uplink_traffic
from thalweg.schedules import Group

CATALOG = default_catalog()


def of(plan: str, rack_sizes: list[int], uplink: str = "2gbit") -> float | None:
    group = Group.everybody(Cluster.regular(rack_sizes, nic="1gbit", uplink=uplink))
    settled = CATALOG.plan(plan)
    period = mixing_of(settled, group, CATALOG).period
    return uplink_traffic(settled, group, CATALOG, period)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("dssync", 1.5),  # 2(C-1)/C: all together, with fast uplinks
        ("gossip", 2.0),
        ("gossip(graph=exponential)", 2.75),
        ("local_sgd(every=2, levels=rack)", 1.5 / 2),
        ("local_sgd(every=4, levels=rack)", 1.5 / 4),
        ("local_sgd(every=4)", 1.875 / 4),  # 2(N-1)/N
    ],
)
def test_even_racks(plan: str, expected: float) -> None:
    assert of(plan, [4] * 4) == pytest.approx(expected, rel=0.01)


def test_pairs_and_windows_send_less() -> None:
    assert of("dssync", [4] * 4, "1gbit") == pytest.approx(1)
    assert of("dssync", [4] * 4, "500mbit") == pytest.approx(1)
    assert of("dssync", [4] * 4, "250mbit") == pytest.approx(1 / 4)


def test_a_single_rack_has_no_uplink() -> None:
    assert of("dssync", [4]) is None

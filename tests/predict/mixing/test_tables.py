"""The figures of known tables, within their rounding."""

from __future__ import annotations

from math import inf
from pathlib import Path

import numpy as np
import pytest

from thalweg.catalog import default_catalog
from thalweg.errors import PlanError
from thalweg.facts import Cluster
from thalweg.predict.mixing import (
    Mixing,
    MixingBlock,
    MixingSummary,
    mixing_of,
    mixing_summary,
    uplink_traffic,
)
from thalweg.schedules import Group

CATALOG = default_catalog()


def of(plan: str, racks: int, members: int, uplink: str = "1gbit") -> MixingSummary:
    cluster = Cluster.regular([members] * racks, nic="1gbit", uplink=uplink)
    return mixing_summary(mixing_of(CATALOG.plan(plan), Group.everybody(cluster), CATALOG))


@pytest.mark.parametrize(
    ("racks", "members", "period", "gap", "sigma_gap", "per_step", "steps", "drift"),
    [
        (2, 4, 4, 0.802, 0.704, 0.667, 19, 0.37),
        (4, 4, 4, 0.802, 0.704, 0.667, 19, 0.41),
        (8, 8, 8, 0.709, 0.660, 0.857, 46, 0.43),
        (2, 2, 4, 0.750, 0.646, 0.707, 21, 0.62),  # with whole racks at every second step
    ],
)
def test_shuffled_groups(
    racks: int,
    members: int,
    period: int,
    gap: float,
    sigma_gap: float,
    per_step: float,
    steps: int,
    drift: float,
) -> None:
    """All racks together: their uplinks are twice as fast as NICs."""
    found = of("dssync", racks, members, uplink="2gbit")
    assert found.connected
    assert (found.period, found.steps_to_little) == (period, steps)
    assert found.gap == pytest.approx(gap, abs=5e-4)
    assert found.sigma_gap == pytest.approx(sigma_gap, abs=5e-4)
    assert found.contraction == pytest.approx(per_step, abs=5e-4)
    assert found.drift == pytest.approx(drift, abs=5.1e-3)


@pytest.mark.parametrize("uplink", ["1gbit", "500mbit"])
@pytest.mark.parametrize(
    ("racks", "members", "period", "gap", "per_step", "steps", "drift"),
    [(4, 4, 12, 0.928, 0.803, 34, 0.67), (8, 8, 56, 0.988, 0.925, 90, 0.80)],
)
def test_racks_in_pairs(
    uplink: str,
    racks: int,
    members: int,
    period: int,
    gap: float,
    per_step: float,
    steps: int,
    drift: float,
) -> None:
    found = of("dssync", racks, members, uplink=uplink)
    assert (found.period, found.steps_to_little) == (period, steps)
    assert found.gap == pytest.approx(gap, abs=5e-4)
    assert found.contraction == pytest.approx(per_step, abs=5e-4)
    assert found.drift == pytest.approx(drift, abs=5e-3)


def test_without_contention_it_depends_on_the_size_of_racks_only() -> None:
    """(G-2)/(G-1) a step."""
    for racks, members in [(2, 3), (5, 6), (3, 5), (2, 6)]:
        rate = of("dssync", racks, members).contraction
        assert rate == pytest.approx((members - 2) / (members - 1), abs=1e-6)


@pytest.mark.parametrize(
    ("plan", "racks", "members", "period", "steps", "drift"),
    [
        ("gossip", 4, 4, 1, 133, 1.47),
        ("gossip", 8, 8, 1, 2149, 7.44),
        ("gossip", 2, 2, 1, 7, 0.09),
        ("gossip(graph=exponential)", 4, 4, 4, 4, 0.69),
        ("gossip(graph=exponential)", 8, 8, 6, 6, 0.89),
        ("local_sgd(every=2, levels=rack)", 4, 4, 2, 2, 0.09),
        ("local_sgd(every=4, levels=rack)", 4, 4, 4, 4, 0.28),
        ("local_sgd(every=8, levels=rack)", 8, 8, 8, 8, 0.38),
        ("local_sgd(every=1)", 4, 4, 1, 1, 0),
        ("gossip+fp16", 4, 4, 1, 133, 1.47),  # mixes as if nothing were lost
    ],
)
def test_others(plan: str, racks: int, members: int, period: int, steps: int, drift: float) -> None:
    found = of(plan, racks, members)
    assert (found.period, found.steps_to_little) == (period, steps)
    assert found.drift == pytest.approx(drift, abs=5e-3)
    assert found.drift_before == pytest.approx(found.drift + 1 - 1 / (racks * members))


@pytest.mark.parametrize(("every", "workers"), [(1, 4), (4, 4), (8, 16)])
def test_local_steps_add_up(every: int, workers: int) -> None:
    """After k steps alone, k times (N-1)/N."""
    alone = (1 - 1 / workers) * sum(range(every)) / every
    found = of(f"local_sgd(every={every})", 1, workers)
    assert found.drift == pytest.approx(alone, abs=1e-9)
    assert found.longest_pause == found.steps_to_little == every
    assert found.contraction == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("every", [1, 4])
def test_a_result_one_step_late(every: int) -> None:
    """x(t) = W_{t-1} x(t-1) + u(t): as far apart as the others are before averaging."""
    in_time = of(f"local_sgd(every={every})", 4, 4)
    late = of(f"local_sgd(every={every}, delay=1)", 4, 4)
    assert late.drift == pytest.approx(in_time.drift_before)
    assert late.contraction == in_time.contraction


@pytest.mark.parametrize(("racks", "members"), [(4, 4), (8, 8), (3, 5)])
def test_two_levels_with_the_upper_one_late(racks: int, members: int) -> None:
    """Racks differ by one step's noise, each by that of the mean of its members."""
    late = of("local_sgd(every=1, levels=rack, delay=1)", racks, members)
    assert late.drift == pytest.approx((1 - 1 / racks) / members)
    assert late.contraction == 0


def test_two_slots_that_never_meet() -> None:
    """The table of the paper on racks of two, without whole racks."""
    half = np.full((2, 2), 0.5)
    steps = tuple((MixingBlock(np.array(pair), half),) for pair in [(0, 2), (1, 3)])
    found = mixing_summary(Mixing(4, 2, steps))
    assert not found.connected
    assert (found.gap, found.sigma_gap, found.contraction) == (0, 0, 1)
    assert found.steps_to_little is None
    assert found.drift == found.drift_before == inf
    assert found.longest_pause == 2


def test_who_meets_nobody_has_an_endless_pause() -> None:
    pair = MixingBlock(np.array([0, 1]), np.full((2, 2), 0.5))
    assert mixing_summary(Mixing(3, 1, ((pair,),))).longest_pause is None


def test_long_periods_are_looked_at_in_part() -> None:
    cluster = Cluster.regular([7, 9, 11, 13])
    mixing = mixing_of(CATALOG.plan("dssync"), Group.everybody(cluster), CATALOG)
    assert (mixing.period, len(mixing.steps)) == (2 * 7 * 9 * 11 * 13, 4096)


def test_a_long_product_is_not_lost_in_rounding() -> None:
    """(2/3)^800 is far below what a number can tell from rounding."""
    group = Group.everybody(Cluster.regular([4] * 4))
    once = mixing_of(CATALOG.plan("dssync"), group, CATALOG)
    found = mixing_summary(Mixing(once.size, 800, once.steps * 200))
    assert found.gap == found.sigma_gap == 1
    assert found.contraction == pytest.approx(2 / 3)
    assert (found.steps_to_little, round(found.drift, 2)) == (19, 0.41)


def test_gradient_plans_have_no_replicas_that_differ() -> None:
    with pytest.raises(PlanError, match="ring averages gradients, replicas never differ; try"):
        of("ring", 2, 2)


ONE_RACK, ONE_HOST = ["250mbit"] + ["1gbit"] * 3, ["250mbit"] + ["1gbit"] * 15
PAGE = Path(__file__).parents[3] / "docs" / "does-group-averaging-converge.md"


@pytest.mark.parametrize(
    ("plan", "what", "uplink", "nic"),
    [
        ("dssync", ", fast uplinks: racks all together", "2gbit", "1gbit"),
        ("dssync", ": racks in pairs", "1gbit", "1gbit"),
        ("dssync", ": racks in pairs", "500mbit", "1gbit"),
        ("dssync", ", fast uplinks, one NIC at a quarter", "2gbit", ONE_HOST),
        ("dssync", ", one NIC at a quarter", "1gbit", ONE_HOST),
        ("dssync", ", one uplink at a quarter", ONE_RACK, "1gbit"),
        ("dssync", ", both", ONE_RACK, ONE_HOST),
        ("gossip", "", "1gbit", "1gbit"),
        ("gossip(graph=exponential)", "", "1gbit", "1gbit"),
        ("local_sgd(every=4)", "", "1gbit", "1gbit"),
        ("local_sgd(every=4, levels=rack)", "", "1gbit", "1gbit"),
    ],
)
def test_the_page_says_the_same(
    plan: str, what: str, uplink: str | list[str], nic: str | list[str]
) -> None:
    group = Group.everybody(Cluster.regular([4] * 4, nic=nic, uplink=uplink))
    found = mixing_summary(mixing_of(CATALOG.plan(plan), group, CATALOG))
    bytes_a_step = uplink_traffic(CATALOG.plan(plan), group, CATALOG, found.period)
    rate = f"{found.contraction:.3f}" if found.contraction > 1e-6 else "0"
    row = (
        f"| `{plan}`{what} | {found.period} | {rate} | {found.steps_to_little} "
        f"| {found.drift:.2f} | {bytes_a_step:.2f} |"
    )
    assert row in PAGE.read_text().splitlines(), row

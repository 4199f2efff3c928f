"""Who is late and why, in the lab: one thing after another is made slow, under each plan."""

from __future__ import annotations

from random import Random

import pytest

from tests.conftest import LabOf
from tests.lab.stragglers import (
    LASTS,
    observed,
    slow_nic,
    slow_rank,
    slow_uplink,
    troubles,
    verdicts,
)
from thalweg.lab import Lab

PARAMS = "500k"  # 2 MB of gradients
RUNS = 2
BEFORE = 15  # steps
PLANS = ["ring", "hierarchical", "dssync", "ddp"]  # the last through the adapter of a DDP object
pytestmark = [pytest.mark.usefixtures("needs_lab"), pytest.mark.timeout(400)]


def eight_hosts(shape: tuple[int, int] = (4, 2)) -> Lab:
    return Lab(racks=shape[0], hosts=shape[1], nic="200mbit", uplink="200mbit")


def named_rightly(lab: Lab, plan: str, seed: int) -> list[str]:
    """What was wrong: who is drawn from the seed."""
    draw = Random(seed)
    rank, host = draw.randrange(8), draw.randrange(8)
    rack = draw.randrange(len(lab.cluster.racks))
    made = troubles(lab, rank, host, rack, draw.choice(["50mbit", "40mbit"]))
    lab.restore()
    found = observed(lab, plan, PARAMS, made, 120, ddp=plan == "ddp")
    return verdicts(found["changes"], made, 120)


@pytest.mark.parametrize("which", ["rank", "NIC", "uplink"])
def test_one_slow_thing_under_ring(which: str, lab_of: LabOf) -> None:
    """And nobody before it."""
    lab = lab_of(racks=3, hosts=2, nic="200mbit", uplink="200mbit")
    made = {
        "rank": slow_rank(BEFORE, 4),
        "NIC": slow_nic(BEFORE, lab.cluster, 1, "40mbit"),
        "uplink": slow_uplink(BEFORE, lab.cluster, 2, "40mbit"),
    }[which]
    found = observed(lab, "ring", PARAMS, [made], BEFORE + LASTS)
    assert verdicts(found["changes"], [made], BEFORE + LASTS) == []


def test_a_healthy_cluster_names_nobody(lab_of: LabOf) -> None:
    lab = lab_of(racks=3, hosts=2, nic="200mbit", uplink="200mbit")
    assert observed(lab, "dssync", PARAMS, [], 30)["changes"] == []


@pytest.mark.slow
def test_a_rank_a_nic_and_an_uplink_under_ring() -> None:
    with eight_hosts() as lab:
        assert named_rightly(lab, "ring", 0) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("plan", PLANS)
def test_who_is_drawn_is_named(plan: str) -> None:
    with eight_hosts() as lab:
        wrong = {seed: named_rightly(lab, plan, seed) for seed in range(1, RUNS + 1)}
    for seed, problems in wrong.items():
        print(f"{plan}, seed {seed}: {problems or 'right'}")
    assert not any(wrong.values()), wrong


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("plan", PLANS)
def test_healthy_runs_name_nobody(plan: str) -> None:
    with eight_hosts() as lab:
        found = [
            observed(lab, plan, PARAMS, [], 60, ddp=plan == "ddp")["changes"] for _ in range(RUNS)
        ]
    assert found == [[]] * RUNS


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("plan", PLANS)
def test_two_racks(plan: str) -> None:
    """The way to the store tells which of the two uplinks it is."""
    with eight_hosts((2, 4)) as lab:
        assert named_rightly(lab, plan, 21) == []

"""Waiting for late workers, against expectations by hand."""

from dataclasses import replace

import numpy as np
import pytest

from thalweg import Cluster, parse_plan
from thalweg.facts import Duration, StragglerDelay, TransportCosts
from thalweg.predict import straggler_recurrence
from thalweg.predict.straggler_recurrence import (
    SAMPLED_WARMUP_STEPS,
    GroupExchange,
    async_step_seconds,
    decodes,
    draw,
    first_k_arrival,
    group_step_seconds,
    quorum_step_seconds,
)
from thalweg.redundancy import allocation_of
from thalweg.schedules import Group

EVERYBODY = [[GroupExchange((0, 1, 2, 3), 0.5)]]


def nobody(steps: int, ranks: int) -> straggler_recurrence.Times:
    return np.zeros((steps, ranks))


def test_a_group_waits_for_its_latest() -> None:
    late = nobody(100, 4)
    late[:, 2] = 3.0
    assert group_step_seconds(EVERYBODY, 1.0, late) == pytest.approx(1.0 + 3.0 + 0.5)


def test_lateness_of_different_ranks_adds_up_between_two_meetings() -> None:
    """They meet at every second step; rank 0 is late at one of them, rank 1 at the other."""
    late = nobody(400, 4)
    late[0::2, 0] = late[1::2, 1] = 1.0
    meetings = [[], [GroupExchange((0, 1, 2, 3), 0.0)]]
    assert group_step_seconds(meetings, 1.0, late) == pytest.approx((2 * 1.0 + 1.0) / 2, rel=0.01)


def test_a_group_that_meets_nobody_else_holds_up_nobody_else() -> None:
    late = nobody(100, 4)
    late[:, 3] = 9.0
    pairs = [[GroupExchange((0, 1), 0.0), GroupExchange((2, 3), 0.0)]]
    assert group_step_seconds(pairs, 1.0, late) == pytest.approx((2 * 1.0 + 2 * 10.0) / 4)


def test_what_is_needed_later_is_waited_for_later() -> None:
    slow = [[GroupExchange((0, 1), 5.0, delay=1)]]
    assert group_step_seconds(slow, 1.0, nobody(100, 2)) == pytest.approx(5.0, rel=0.05)
    assert group_step_seconds(
        [[GroupExchange((0, 1), 0.5, delay=1)]], 1.0, nobody(100, 2)
    ) == pytest.approx(1.0)


def test_draws_have_the_hosts_probabilities() -> None:
    cluster = Cluster.regular([2])
    [rack] = cluster.racks
    delay = StragglerDelay(probability=0.25, delay=Duration(2.0))
    hosts = (rack.hosts[0], replace(rack.hosts[1], late=delay))
    cluster = replace(cluster, racks=(replace(rack, hosts=hosts),))
    drawn = draw(cluster, (0, 1), steps=4000)
    assert not drawn[:, 0].any()
    assert (drawn[:, 1] == 2.0).mean() == pytest.approx(0.25, abs=0.02)


def test_a_quorum_of_all_waits_for_all() -> None:
    late = nobody(100, 3)
    late[:, 1] = 2.0
    assert quorum_step_seconds(first_k_arrival(3), np.ones(3), 0.25, late) == pytest.approx(
        1.0 + 2.0 + 0.25
    )


def test_a_quorum_goes_on_without_one_who_is_always_late() -> None:
    late = nobody(200, 3)
    late[:, 1] = 50.0
    assert quorum_step_seconds(first_k_arrival(2), np.ones(3), 0.25, late) == pytest.approx(1.25)


def test_who_was_late_once_is_missing_until_it_has_caught_up() -> None:
    """Of three, two are needed. Rank 0 is late for ten steps' time at one step, rank 1 for one
    step's in the middle of that, which then has to be waited for."""
    late = nobody(60, 3)
    late[30, 0] = 10.0
    late[35, 1] = 1.0
    seconds = quorum_step_seconds(first_k_arrival(2), np.ones(3), 0.0, late) * (
        60 - SAMPLED_WARMUP_STEPS
    )
    assert seconds == pytest.approx((60 - SAMPLED_WARMUP_STEPS) * 1.0 + 1.0)


def test_a_code_decodes_without_one_of_each_team_and_no_more() -> None:
    group = Group.everybody(Cluster.flat(6))
    allocation = allocation_of(parse_plan("gc(stragglers=1)"), group)
    enough = decodes(allocation, group.ranks)
    ready = np.ones(6)
    for late in range(6):
        assert enough(np.where(np.arange(6) == late, 9.0, ready)) == 1.0
    teams = [
        (one, other)
        for one in range(6)
        for other in range(one)
        if enough(np.where(np.isin(np.arange(6), (one, other)), 9.0, ready)) == 9.0
    ]
    assert len(teams) == 3  # pairs that replace one another, and are both late


def test_the_root_of_everybodys_own_pace_serves_one_after_the_other() -> None:
    """Where its NIC is the bottleneck, a step takes as long as all others' gradients through it."""
    cluster = Cluster.regular([5], nic="100mbit", latency=Duration(0.0))
    nbytes, ranks = 1_250_000.0, tuple(range(5))
    seconds = async_step_seconds(
        cluster, TransportCosts(), ranks, 0, nbytes, 0.01, nobody(60, 5), staleness=100
    )
    of_others = 4 * 0.1
    assert seconds == pytest.approx((4 * of_others + 0.01) / 5, rel=0.05)


def test_nobody_is_further_ahead_than_the_staleness_allows() -> None:
    cluster = Cluster.regular([3], nic="100gbit", latency=Duration(0.0))
    late = nobody(60, 3)
    late[:, 2] = 1.0
    free = async_step_seconds(
        cluster, TransportCosts(), (0, 1, 2), 0, 1.0, 0.01, late, staleness=1000
    )
    bound = async_step_seconds(
        cluster, TransportCosts(), (0, 1, 2), 0, 1.0, 0.01, late, staleness=2
    )
    assert free == pytest.approx((0.01 + 0.01 + 1.01) / 3, rel=0.02)
    assert bound == pytest.approx(1.01, rel=0.05)

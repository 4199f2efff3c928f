"""The all-reduce around a straggler: who it is, and what its lateness costs."""

from __future__ import annotations

import pytest

from tests.clusters import with_late
from thalweg.catalog import default_catalog, parse_plan
from thalweg.errors import LayoutError
from thalweg.facts import Cluster, Duration, StragglerDelay
from thalweg.predict.flow_simulator import simulate
from thalweg.schedules import Group, MoveKind, Schedule, check
from thalweg.schedules.topologies.stragglar import TOPOLOGY, the_straggler

ELEMENTS = 1_250_000  # 5 MB, 0.2 s at 200 Mbit/s
TRANSFER_SECONDS = 0.2


def even(workers: int) -> Group:
    cluster = Cluster.regular([workers], nic="200mbit", latency=Duration(1e-4))
    return Group.everybody(cluster)


def built(group: Group, straggler: int | None = None) -> Schedule:
    return TOPOLOGY.build(group, ELEMENTS, 4, 0, straggler=straggler)


@pytest.mark.parametrize("workers", range(2, 18))
@pytest.mark.parametrize("which", ["first", "last", "middle"])
def test_any_member_may_be_the_straggler(workers: int, which: str) -> None:
    straggler = {"first": 0, "last": workers - 1, "middle": workers // 2}[which]
    check(TOPOLOGY.build(even(workers), 50 * workers + 1, 4, 0, straggler=straggler))


@pytest.mark.parametrize("workers", [2, 5, 8, 16])
def test_the_straggler_sends_and_receives_each_element_once(workers: int) -> None:
    schedule = built(even(workers), 1)
    moves = list(schedule.moves(1))
    assert sum(schedule.span_elements(m) for m in moves if m.kind.sends) == ELEMENTS
    assert sum(schedule.span_elements(m) for m in moves if not m.kind.sends) == ELEMENTS
    assert {m.kind for m in moves} == {MoveKind.SEND, MoveKind.ADD}


def test_the_latest_on_average_is_the_straggler_else_the_last() -> None:
    cluster = even(4).cluster
    assert the_straggler(Group.everybody(cluster)) == 3
    often = StragglerDelay(probability=0.5, delay=Duration(0.3))
    seldom = StragglerDelay(probability=0.01, delay=Duration(2.0))
    late = Group.everybody(with_late(cluster, {0: seldom, 2: often}))
    assert the_straggler(late) == 2
    assert the_straggler(late, 1) == 1
    with pytest.raises(LayoutError, match="rank 4 is not in the group"):
        built(late, 4)


@pytest.mark.parametrize("workers", [4, 7, 8])
def test_after_the_straggler_has_come_its_data_is_all_that_is_left(workers: int) -> None:
    """By the docstring's formula; a ring then still has 2(N-1)/N of the data to send."""
    group, n = even(workers), workers - 1
    schedule = built(group)
    k = len(schedule.sizes) // n
    seconds = simulate(schedule, group.cluster, starts={n: 1.0})
    left = TRANSFER_SECONDS * (1 + (n - 1) / (n * k)) + workers * 1e-4
    assert max(seconds.values()) - 1.0 == pytest.approx(left, rel=0.05)
    ring = default_catalog().topologies["ring"].build(group, ELEMENTS, 4, 0)
    whole = max(simulate(ring, group.cluster, starts={n: 1.0}).values()) - 1.0
    assert whole > 1.3 * left


def test_it_is_a_plan_with_an_argument() -> None:
    assert parse_plan("stragglar(straggler=2)+fp16").topology.arguments == {"straggler": 2}

from __future__ import annotations

import numpy as np
import pytest

from thalweg.catalog import parse_plan
from thalweg.engine.collectives import RoundCounter
from thalweg.errors import PlanError
from thalweg.facts import Cluster, Size, Tensor, Workload
from thalweg.schedules import Group
from thalweg.training.compiled_steps import CompiledSteps

WORKLOAD = Workload(
    name="w", tensors=tuple(Tensor(name=str(i), shape=(100 * (i + 1),)) for i in range(3))
)


def itinerary(sync: str, rank: int, racks: tuple[int, ...] = (4,)) -> CompiledSteps:
    group = Group.everybody(Cluster.regular(racks))
    return CompiledSteps(parse_plan(sync), group, WORKLOAD, rank)


def test_the_clock_numbers_rounds_within_a_step() -> None:
    clock = RoundCounter(7)
    assert [clock.claim(2), clock.claim(1), clock.claim(0), clock.claim(1)] == [0, 2, 3, 3]
    clock.tick()
    assert (clock.step, clock.claim(1)) == (8, 0)


@pytest.mark.parametrize("sync", ["ring @ bucket=1KB", "tree", "dssync @ bucket=1KB", "gossip"])
def test_all_ranks_use_up_the_same_numbers(sync: str) -> None:
    ranks = [itinerary(sync, rank) for rank in range(4)]
    for step in range(9):
        assert len({rank.at(step).numbers for rank in ranks}) == 1
        for rank in ranks:
            rank_step = rank.at(step)
            numbers = {r.number for chain in rank_step.chains for r in chain.rounds}
            assert numbers == set(rank_step.programs)
            assert all(number < rank_step.numbers for number in numbers)


def test_a_bucket_is_one_stop() -> None:
    buckets = WORKLOAD.buckets(Size.parse("1KB"))
    rank_step = itinerary("ring @ bucket=1KB", 2).at(0)
    assert [chain.bucket for chain in rank_step.chains] == [bucket.index for bucket in buckets]
    assert {chain.contributions(2) for chain in rank_step.chains} == {4}


def test_steps_between_two_meetings_are_empty() -> None:
    local = itinerary("local_sgd(every=3)", 0)
    assert [len(local.at(step).chains) for step in range(7)] == [0, 0, 1, 0, 0, 1, 0]
    assert local.at(2).chains[0].contributions(0) == 4


def test_legs_repeat_and_are_kept() -> None:
    shuffled = itinerary("dssync", 0, racks=(4, 4))
    assert shuffled.at(1).chains is shuffled.at(1).chains
    groups = [next(shuffled.at(step).chains[0].rounds).group.ranks for step in range(8)]
    assert groups == 2 * [(0, 4), (0, 2, 3), (0, 1, 3), (0, 1, 2)]


def test_a_step_begins_with_its_own_numbers() -> None:
    clock, ring = RoundCounter(5), itinerary("ring @ bucket=1KB", 1)
    first, again = ring.begin(clock), ring.begin(clock)
    assert (first.step, first.first, again.first) == (5, 0, first.numbers)
    [chain, *_] = again.chains
    [round_] = chain.rounds
    task = again.task(chain, round_, np.zeros(round_.schedule.elements, np.float32))
    assert (task.step, task.round_number) == (5, again.first + round_.number)


@pytest.mark.parametrize("sync", ["auto", "asp", "lgc(k=2)"])
def test_plans_without_rounds(sync: str) -> None:
    with pytest.raises(PlanError):
        itinerary(sync, 0)

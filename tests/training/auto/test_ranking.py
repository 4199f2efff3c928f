from __future__ import annotations

from dataclasses import replace

import pytest

from thalweg.catalog import default_catalog, parse_plan
from thalweg.declarations import Promise
from thalweg.facts import Cluster, Duration, Machine, Situation, Size, StragglerDelay, Workload
from thalweg.predict import Advice, advise
from thalweg.predict.advisor import ExtraSteps
from thalweg.predict.fitting import FREE_BACKEND_ASSUMPTION
from thalweg.schedules import Group
from thalweg.training.auto.controller import PlanRanker, cycle_of, waiting_seconds, warmup_steps_of
from thalweg.training.auto.request import is_auto, plan_at_first, with_settings


def ranker_of(situation: Situation) -> PlanRanker:
    group = Group.everybody(situation.cluster)
    return PlanRanker(situation, group, parse_plan("auto"), 8, lambda plan: None)


@pytest.mark.parametrize(
    ("sync", "step", "steps"),
    [
        ("ring", 8, 2),
        ("local_sgd(every=8)", 8, 2),
        ("ring+fp16", 8, 2 + 2 * 3),  # two that settle, three each way
        ("ring+powersgd(warmup=20)", 8, 12 + 2 + 2 * 3),
        ("ring+powersgd(warmup=20)", 30, 2 + 2 * 3),
    ],
)
def test_warm_up_steps(sync: str, step: int, steps: int) -> None:
    assert warmup_steps_of(parse_plan(sync), step) == steps


@pytest.mark.parametrize(
    ("sync", "steps"),
    [("ring", 1), ("local_sgd(every=8)", 8), ("local_sgd(every=100)", 16), ("gc(stragglers=1)", 1)],
)
def test_how_long_a_plan_takes_to_repeat_itself(sync: str, steps: int) -> None:
    assert cycle_of(parse_plan(sync), Group.everybody(Cluster.flat(4))) == steps


@pytest.mark.parametrize(
    "sync", ["ring @ bucket=1MB", "ring+sign @ bucket=1MB", "dssync", "ring+fp16 @ bucket=1MB"]
)
def test_a_plan_of_another_bucket_needs_as_many_steps(sync: str) -> None:
    """A plan that runs, but isn't among those that were advised in its bucket size."""
    plan = parse_plan(sync)
    more = ExtraSteps(optimizer="adamw").of(plan, default_catalog().guarantee(plan).promise)
    cluster = Cluster.flat(4)
    situation = Situation(
        cluster=cluster, machine=Machine(), workload=Workload.of_size(Size.parse("1MB"))
    )
    advice = Advice(
        situation=situation,
        allow=Promise.EVENTUAL,
        ranking=(),
        verdict="",
        optimizer="adamw",
    )
    [found] = ranker_of(situation).ranking(advice, plan)
    assert found.sync == sync
    assert found.steps == 1 + (more or 0)


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_plans_whose_extra_steps_are_not_known_are_not_taken_up(optimizer: str) -> None:
    cluster = Cluster.regular([4], nic="100mbit")
    situation = Situation(
        cluster=cluster, machine=Machine(), workload=Workload.of_size(Size.parse("4MB"))
    )
    found = ranker_of(situation)
    advice = advise(situation, allow=Promise.LOSSY, optimizer=optimizer)
    taken = [candidate.sync for candidate in found.ranking(advice, parse_plan("ring"))]
    assert any("+" in str(ranked.plan) for ranked in advice.ranking)
    assert any("+" in sync for sync in taken) == (optimizer == "adamw")
    assert not [sync for sync in taken if "topk" in sync]


def test_a_backend_that_was_not_tried_is_not_chosen() -> None:
    cluster = Cluster.flat(4)
    situation = Situation(
        cluster=cluster,
        machine=Machine(assumed=(FREE_BACKEND_ASSUMPTION,)),
        workload=Workload.of_size(Size.parse("1MB")),
    )
    ranker = ranker_of(situation)
    advice = advise(situation, refuse=ranker.refuse)
    ranking = ranker.ranking(advice, parse_plan("ring"))
    assert "ddp" not in [candidate.sync for candidate in ranking]
    assert advice.left_out["ddp"] == "the backend of ddp can't be measured here"


def test_how_long_all_wait_for_who_is_late() -> None:
    cluster = Cluster.flat(4)
    assert waiting_seconds(cluster) == 0
    [rack] = cluster.racks
    delay = StragglerDelay(probability=0.1, delay=Duration(2.0))
    hosts = tuple(replace(host, late=delay) for host in rack.hosts)
    cluster = replace(cluster, racks=(replace(rack, hosts=hosts),))
    assert waiting_seconds(cluster) == pytest.approx(4 * 0.2)


def test_auto_is_no_plan_by_itself() -> None:
    asked = parse_plan("auto(allow=lossy) @ bucket=1MB, transport=zeromq")
    assert is_auto(asked)
    assert str(plan_at_first(asked)) == "ring @ bucket=1MB, transport=zeromq"
    named = parse_plan("tree @ bucket=4MB")
    assert plan_at_first(named) is named
    assert str(with_settings(named, asked)) == "tree @ bucket=1MB, transport=zeromq"

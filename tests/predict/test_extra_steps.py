"""Extra steps: priced as measured under the optimizer, and plans without a figure last."""

from __future__ import annotations

from functools import cache

import pytest

from thalweg import Cluster, Situation, advise
from thalweg.catalog import default_catalog, parse_plan
from thalweg.declarations import Promise
from thalweg.errors import PlanError, UsageError
from thalweg.facts import Duration
from thalweg.plan import Plan
from thalweg.predict import Advice
from thalweg.predict.advisor import ExtraSteps, optimizer_named
from thalweg.predict.assumptions import assumed_machine, workload_of
from thalweg.predict.candidates import candidates
from thalweg.predict.step_simulator import codec_cost
from thalweg.schedules import Group

SWITCH = Cluster.regular([8], nic="10gbit", latency=Duration(1e-4))
RACKS = Group.everybody(Cluster.regular([2, 2]))
MEASURED = ("bf16", "fp16", "int8", "sign", "powersgd(rank=4, warmup=30)")


@cache
def advice(model: str, allow: Promise, optimizer: str | None = None) -> Advice:
    return advise(situation(model), allow=allow, optimizer=optimizer)


def situation(model: str) -> Situation:
    workload = workload_of(model, "a100")
    return Situation(cluster=SWITCH, workload=workload, machine=assumed_machine())


def more(sync: str, optimizer: str) -> float | None:
    plan = parse_plan(sync)
    return ExtraSteps(optimizer=optimizer).of(plan, default_catalog().guarantee(plan).promise)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_what_was_measured(optimizer: str) -> None:
    """In every topology, with any settings; averages of parameters as they were measured alone."""
    assert more("ring", optimizer) == 0
    for compressor in MEASURED:
        found = more(f"ring+{compressor}", optimizer)
        assert found is not None
        assert found >= 0
        assert more(f"hierarchical+{compressor} @ bucket=1MB", optimizer) == found
    assert more("dssync", optimizer) is not None
    assert more("local_sgd(every=8)", optimizer) is not None
    for other in ("ring+powersgd(rank=2)", "local_sgd(every=64)", "dssync+bf16", "asp", "lgc"):
        assert more(other, optimizer) is None


def test_bits_of_a_sign_cost_more_steps_than_bf16_under_adam() -> None:
    sign, bf16 = more("ring+sign", "adamw"), more("ring+bf16", "adamw")
    assert sign is not None
    assert bf16 is not None
    assert sign > bf16 + 0.05


def test_of_other_optimizers_nothing_is_known() -> None:
    assert more("ring+bf16", "lion") is None
    assert more("ring", "lion") == 0


def test_every_measured_plan_is_a_candidate() -> None:
    """What is advised is written as it was measured."""
    found, _ = candidates(RACKS, Promise.EVENTUAL, default_catalog())
    texts = {str(plan) for plan in found}
    assert {f"ring+{compressor}" for compressor in MEASURED} <= texts
    assert {"dssync", "local_sgd(every=8)"} <= texts


def test_signs_are_not_first_under_adam() -> None:
    """BERT is trained with AdamW, where signs take more steps than they save seconds."""
    found = advice("bert-base", Promise.LOSSY)
    assert found.optimizer == "adamw"
    assert str(found.best.plan).partition(" @")[0] == "ring+bf16"
    assert "the optimizer is adamw" in found.assumed


@pytest.mark.parametrize(("model", "optimizer"), [("resnet50", "sgd"), ("bert-base", "lion")])
def test_what_was_not_measured_is_last_and_says_so(model: str, optimizer: str) -> None:
    """Before it come plans that needed so many more steps that a long run may need others."""
    found = advice(model, Promise.LOSSY, optimizer)
    places = [(not ranked.reliable, ranked.steps is None) for ranked in found.ranking]
    assert places == sorted(places)
    assert (True, True) in places
    costs = [
        ranked.estimate.seconds * (ranked.steps or 0) for ranked in found.ranking if ranked.reliable
    ]
    assert costs == sorted(costs)
    for ranked in found.ranking:
        assert ("extra steps not measured under" in ranked.why) == (ranked.steps is None)
        assert ranked.reliable == (ranked.steps is not None and ranked.steps <= 1.25)
    if optimizer == "lion":
        assert {ranked.promise for ranked in found.ranking if ranked.reliable} == {Promise.EXACT}


def test_a_share_that_was_given_is_relied_on() -> None:
    given = ExtraSteps(optimizer="lion", given={Promise.LOSSY: 3.0})
    assert given.of(parse_plan("ring+topk"), Promise.LOSSY) == 3.0
    assert given.is_reliable(Promise.LOSSY, 3.0)
    assert not given.is_reliable(Promise.EVENTUAL, 3.0)


def test_a_plan_of_the_next_class_is_hinted_at() -> None:
    """Nothing exact gains on a ring over one switch; half the bytes do."""
    found = advice("resnet50", Promise.EXACT)
    assert "Keep DDP" in found.verdict
    assert found.next_class is not None
    assert found.next_class.promise is Promise.LOSSY
    assert found.next_class.gain >= 1.05
    best = advice("resnet50", Promise.LOSSY).best
    assert found.hint() == f"With --allow lossy: {best.plan} {best.gain:.2f}x"
    assert {ranked.promise for ranked in found.ranking} == {Promise.EXACT}


def test_no_hint_where_something_allowed_gains() -> None:
    found = advice("bert-base", Promise.LOSSY)
    assert found.next_class is None
    assert found.hint() == ""


def test_no_hint_at_what_was_not_measured() -> None:
    assert advice("resnet50", Promise.EXACT, "lion").next_class is None


def test_what_is_refused_is_neither_ranked_nor_hinted_at() -> None:
    """DDP stays what others are compared with."""

    def refuse(plan: Plan) -> None:
        if str(plan) in ("ddp", "ring+bf16"):
            raise PlanError(f"no {plan} here", "take another")

    found = advise(situation("resnet50"), refuse=refuse)
    assert found.left_out["ddp"] == "no ddp here"
    assert "ddp" not in {ranked.plan.text.preset.name for ranked in found.ranking}
    assert found.best.vs_ddp == pytest.approx(1, rel=0.05)
    assert "bf16" not in found.hint()


def test_optimizers_by_name() -> None:
    assert optimizer_named(" AdamW ") == "adamw"
    with pytest.raises(UsageError, match="there is no optimizer 'adm'"):
        optimizer_named("adm")


def test_a_compressor_costs_what_it_was_timed_at_with_its_own_arguments() -> None:
    machine = assumed_machine()
    for text in ("powersgd(rank=1)", "powersgd(rank=4)", "powersgd(rank=16)", "bf16"):
        timed = machine.codecs[text]
        assert codec_cost(parse_plan(f"ring+{text}").precision, machine)[0] == timed
    warmed = parse_plan("ring+powersgd(rank=4, warmup=30)").precision
    assert codec_cost(warmed, machine)[0] == machine.codecs["powersgd(rank=4)"]

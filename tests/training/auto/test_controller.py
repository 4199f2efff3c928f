"""`plan="auto"` on real ranks: all choose the same, at the same step, and say so."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from tests.training.coded import Fate
from tests.training.workers import (
    SECONDS,
    TIMEOUT,
    fingerprint,
    on_ranks,
    one_value,
    raised,
    same_bits,
    values,
)
from thalweg.bench.training import choices_of
from thalweg.catalog import default_catalog, parse_plan
from thalweg.errors import NotFitted, PlanError, RunError, WorkerFailed
from thalweg.facts import Cluster, Duration, Machine, Situation, Size, Workload
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.launch.worker_process import RESTARTS_VARIABLE
from thalweg.plan import Plan
from thalweg.predict import Advice, Breakdown, Estimate, RankedPlan
from thalweg.training import Run, attach
from thalweg.training.auto import policy
from thalweg.training.auto.measurement import RunCalibrator
from thalweg.training.auto.profile import Profile

SIZE = 4
DATA = TensorDataset(torch.randn(80, 4, generator=torch.Generator().manual_seed(1)))
FIRST = 8  # the step of the first advice


def ring_is_slow(run: Run, rank: int) -> None:
    time.sleep(0.02 if str(run.plan).startswith("ring") else 0.0)


def trained(
    rank: int,
    sync: str = "auto",
    *,
    steps: int = 30,
    data: bool = True,
    before: Callable[[Run, int], None] = ring_is_slow,
    **options: Any,
) -> dict[str, Any]:
    """A small job; `before` each step."""
    said: list[str] = []
    logger = logging.getLogger("thalweg")
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: said.append(record.getMessage()) is None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    given: dict[str, Any] = {"data": DATA, "batch": 8} if data else {}
    run = attach(model, optimizer, plan=sync, timeout=TIMEOUT, **given, **options)
    first, plans = run.step, []
    while run.step < steps:
        for epoch in run.epochs(run.step // 10 + 1) if data else [0]:
            for (x,) in run.batches(epoch) if data else [(torch.full((2, 4), rank + 1.0),)]:
                if data:
                    plans.append(str(run.plan))
                before(run, rank)
                optimizer.zero_grad()
                torch.autograd.backward(run.mean(model(x).square().sum(1)))
                optimizer.step()
                if not data:
                    plans.append(str(run.plan))
                if run.step >= steps:
                    break
    if "resume" in options:
        run.save(options["resume"])
    choices = [[c.step, c.sync, c.predicted, c.measured, c.reason] for c in choices_of(run.events)]
    advice = run.report().advice
    left_out = {} if advice is None else dict(advice.left_out)
    assumed = [] if advice is None else list(advice.assumed)
    verdict = "" if advice is None else advice.verdict
    run.close()
    return {
        "first": first,
        "plans": plans,
        "print": fingerprint(model),
        "values": values(model),
        "choices": choices,
        "said": said,
        "left_out": left_out,
        "assumed": assumed,
        "verdict": verdict,
    }


@contextmanager
def advice(*rankings: Sequence[tuple[str, float]]) -> Iterator[None]:
    """Of plans and seconds, best first; the last is given again and again."""
    given = list(rankings)

    def advise(situation: Situation, **asked: Any) -> Advice:
        ranking, left_out = [], {}
        for one in given.pop(0) if len(given) > 1 else given[0]:
            try:
                asked["refuse"](parse_plan(one[0]))
                ranking.append(_advised(*one))
            except PlanError as error:
                left_out[one[0]] = error.problem
        return Advice(
            situation=situation,
            allow=asked["allow"],
            ranking=tuple(ranking),
            verdict="",
            left_out=left_out,
            assumed=situation.assumed,
        )

    def predict(plan: Plan, *_: Any, **__: Any) -> Estimate:
        [seconds] = [each for sync, each in rankings[0] if sync == str(plan).partition(" @")[0]]
        return _advised(str(plan), seconds).estimate

    with (
        patch("thalweg.training.auto.controller.advise", advise),
        patch("thalweg.training.auto.controller.predict", predict),
    ):
        yield


def _advised(sync: str, seconds: float) -> RankedPlan:
    plan = parse_plan(sync)
    estimate = Estimate(
        plan=plan,
        parts=Breakdown(compute=seconds),
        low=0.9 * seconds,
        high=1.1 * seconds,
        form="replay",
    )
    promise = default_catalog().guarantee(plan).promise
    return RankedPlan(
        estimate=estimate,
        vs_ddp=1.0,
        promise=promise,
        steps=1.0,
        survives="",
        why=f"{sync} it is",
    )


def situation_of(calibrator: RunCalibrator) -> Situation:
    workload = Workload.of_size(parse_plan("ring").settings.bucket)
    return Situation(cluster=Cluster.flat(SIZE), machine=Machine(), workload=workload)


MEASURES = RunCalibrator.calibrate


@pytest.fixture(autouse=True)
def unmeasured() -> Iterator[None]:
    """Nothing is measured, but where a test wants it."""
    with patch.object(RunCalibrator, "calibrate", situation_of):
        yield


SLOW = 10.0  # seconds that no step here takes


def test_all_take_up_the_best_at_the_same_step() -> None:
    with advice([("tree", 5.0), ("ring", SLOW)]):
        results = on_ranks(SIZE, trained)
    plans = one_value(results, "plans")
    assert plans == ["ring"] * FIRST + ["tree"] * (30 - FIRST)
    assert same_bits(results)
    [[step, sync, predicted, measured, reason]] = one_value(results, "choices")
    assert (step, sync, predicted, reason) == (FIRST, "tree", 5.0, "tree it is")
    assert measured > 0
    said = results[0]["said"]
    lines = [line for line in said if line.startswith("tree: predicted 5 s (4.5 s to")]
    assert len(lines) == 1
    assert "measured" in lines[0]
    assert not results[1]["said"]


def test_it_is_the_same_training() -> None:
    with advice([("tree", 5.0), ("ring", SLOW)]):
        chosen = on_ranks(SIZE, trained)
    ring = on_ranks(SIZE, lambda rank: trained(rank, "ring"))
    assert chosen[0]["values"] == pytest.approx(ring[0]["values"], abs=1e-6)


def test_a_wrong_prediction_is_repaired_by_looking() -> None:
    """Under `tree` steps take far more than they are predicted to."""

    def before(run: Run, rank: int) -> None:
        time.sleep({"ring": 0.02, "tree": 0.04}.get(str(run.plan), 0.0))

    with advice([("tree", 1e-5), ("double_tree", 2e-5), ("ring", SLOW)]):
        results = on_ranks(SIZE, lambda rank: trained(rank, before=before, steps=50))
    plans = one_value(results, "plans")
    assert plans[FIRST : FIRST + 9] == ["tree"] * 8 + ["double_tree"]
    assert plans[-1] == "double_tree"
    assert same_bits(results)
    assert one_value(results, "choices")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allow", "sync"), [("exact", "gc(stragglers=1)"), ("eventual", "local_sgd(every=4)")]
)
def test_drift_leads_to_another_advice(allow: str, sync: str) -> None:
    """Also from plans whose ranks have no common safe points, or differing replicas."""

    def before(run: Run, rank: int) -> None:
        slow = run.step >= 30 and str(run.plan) != "tree"
        time.sleep({"ring": 0.02}.get(str(run.plan), 0.04 if slow else 0.01))

    first, second = [(sync, 5.0), ("ring", SLOW)], [("tree", 1e-4), ("ring", SLOW), (sync, SLOW)]
    with advice(first, second), patch.object(policy, "ADVICE_COOLDOWN_STEPS", 4):
        results = on_ranks(
            SIZE, lambda rank: trained(rank, f"auto(allow={allow})", before=before, steps=80)
        )
    plans = one_value(results, "plans")
    changed = plans.index("tree")
    profiled = ["ring"] * FIRST if allow == "exact" else []  # away from the code, to look anew
    run = [sync] * (changed - FIRST - len(profiled))
    assert plans[:changed] == ["ring"] * FIRST + run + profiled
    assert changed in range(40, 80, 8)  # agreed on, once it had drifted
    assert plans[-1] == "tree"
    assert [one[:2] for one in one_value(results, "choices")][:2] == [
        [FIRST, sync],
        [changed, "tree"],
    ]
    assert same_bits(results)


def test_who_is_late_under_a_code_follows() -> None:
    """It comes to the step of a decision when the others have gone on, or jumps beyond it."""

    def before(run: Run, rank: int) -> None:
        time.sleep({"ring": 0.02, "gc(stragglers=1)": 0.01}.get(str(run.plan), 0.0))
        if rank == 3 and run.step == 12:
            time.sleep(0.6)

    with advice([("gc(stragglers=1)", 1e-5), ("tree", 2e-5), ("ring", SLOW)]):
        results = on_ranks(SIZE, lambda rank: trained(rank, before=before, steps=60))
    assert [one[:2] for one in one_value(results, "choices")] == [
        [FIRST, "gc(stragglers=1)"],
        [16, "tree"],
    ]
    assert same_bits(results)
    assert all(result["plans"][-1] == "tree" for result in results)


def test_a_code_is_not_left_while_a_rank_is_absent() -> None:
    """A plan that waits for all ranks would wait for it."""

    def before(run: Run, rank: int) -> None:
        time.sleep({"ring": 0.02, "gc(stragglers=1)": 0.01}.get(str(run.plan), 0.0))
        membership = run._session.world.membership
        assert membership is not None
        membership.suspected[SIZE] = 0.0  # no member, so that no heartbeat clears it

    with advice([("gc(stragglers=1)", 1e-5), ("tree", 2e-5), ("ring", SLOW)]):
        results = on_ranks(SIZE, lambda rank: trained(rank, before=before, steps=40))
    assert [one[:2] for one in one_value(results, "choices")] == [[FIRST, "gc(stragglers=1)"]]
    assert all(result["plans"][-1] == "gc(stragglers=1)" for result in results)


def test_an_advisor_that_fails_does_not_end_the_training() -> None:
    with patch(
        "thalweg.training.auto.controller.advise", side_effect=ZeroDivisionError("by nothing")
    ):
        results = on_ranks(SIZE, trained)
    assert set(one_value(results, "plans")) == {"ring"}
    assert "no advice, ring stays: ZeroDivisionError: by nothing" in results[0]["said"]
    assert same_bits(results)


@pytest.mark.slow
def test_measurements_that_make_no_sense_do_not_end_it_either() -> None:
    with (
        patch.object(RunCalibrator, "calibrate", MEASURES),
        patch("thalweg.probing.calibration.fit", side_effect=ZeroDivisionError("by nothing")),
    ):
        results = on_ranks(2, trained)
    assert set(one_value(results, "plans")) == {"ring"}
    lines = "what was measured can't be fitted (ZeroDivisionError: by nothing)"
    assert f"no advice, ring stays: {lines}" in results[0]["said"]
    assert same_bits(results)


def test_what_was_not_seen_is_assumed_aloud() -> None:
    """No cluster file, and no step that could be profiled."""
    found = Situation(
        cluster=Cluster.regular([2], nic="1gbit", latency=Duration(1e-4)),
        machine=Machine(),
        workload=Workload.of_size(Size.parse("1MB")),
    )
    with (
        patch.object(RunCalibrator, "calibrate", MEASURES),
        patch("thalweg.training.auto.measurement.calibrate", return_value=found),
        patch.object(Profile, "_ends", lambda profile: None),
        advice([("tree", 5.0), ("ring", SLOW)]),
    ):
        results = on_ranks(2, trained)
    assert results[0]["assumed"] == ["all hosts in one rack", "computing takes no time"]
    lines = [
        line for line in results[0]["said"] if line.startswith("no cluster file: assuming one rack")
    ]
    assert len(lines) == 1
    assert one_value(results, "plans")[-1] == "tree"


@pytest.mark.slow
def test_who_is_started_again_comes_back_and_all_choose_anew() -> None:
    def before(run: Run, rank: int) -> None:
        ring_is_slow(run, rank)
        if (rank, run.step, os.environ[RESTARTS_VARIABLE]) == (2, 12, "0"):
            os.kill(os.getpid(), signal.SIGKILL)

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        return trained(rank, before=before, steps=40)

    with advice([("tree", 5.0), ("ring", SLOW)]):
        results = run_workers(
            SIZE,
            work,
            timeout=SECONDS,
            director=Fate(restart=[2], resume=[], when=lambda: True),
            spare=range(SIZE),
            debug=True,
        )
    assert all(results)
    assert same_bits(results)
    assert [result["first"] > 0 for result in results] == [False, False, True, False]
    assert {result["plans"][-1] for result in results} == {"tree"}
    assert all(result["choices"] for result in results)


@pytest.mark.slow
def test_a_rank_that_fails_meanwhile_ends_it_for_all() -> None:
    def fails_on_one(calibrator: RunCalibrator) -> Situation:
        if os.environ["RANK"] == "2":
            raise RunError("no ruler here", "buy one")
        return situation_of(calibrator)

    with (
        patch.object(RunCalibrator, "calibrate", fails_on_one),
        advice([("tree", 5.0), ("ring", SLOW)]),
        pytest.raises(WorkerFailed, match="rank 2: no ruler here; buy one"),
    ):
        on_ranks(2 + 1, trained)


def test_plans_that_do_not_suit_are_left_out() -> None:
    """As those with a code where the script has a loader of its own; it is said."""
    with advice([("gc(stragglers=1)", 1.0), ("asp", 2.0), ("tree", 5.0), ("ring", SLOW)]):
        results = on_ranks(SIZE, lambda rank: trained(rank, data=False))
    assert one_value(results, "plans")[FIRST] == "tree"  # what it measures of it may end that
    left_out = results[0]["left_out"]
    assert "which needs data= and batch=" in left_out["gc(stragglers=1)"]
    assert "no step common to all" in left_out["asp"]
    assert any("coded plans are not ranked" in line for line in results[0]["said"])


def test_ddp_with_ones_own_loader() -> None:
    """Taken up inside the model's forward, whose gradients are averaged all the same."""
    with advice([("ddp", 5.0), ("ring", SLOW)]):
        results = on_ranks(2, lambda rank: trained(rank, data=False))
    assert one_value(results, "plans")[: FIRST + 1] == ["ring"] * FIRST + ["ddp"]
    assert same_bits(results)


class Inside(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through the first layer alone."""
        result: torch.Tensor = self[0](x)
        return result


@pytest.mark.parametrize("is_called", [True, False])
def test_ddp_is_left_out_where_it_can_not_run(is_called: bool) -> None:
    """With a layer that is not used, or a model that is not called itself."""

    def work(rank: int) -> dict[str, Any]:
        model = Inside(nn.Linear(4, 2), *([nn.Linear(2, 2)] if is_called else []))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        run = attach(model, optimizer, plan="auto", data=DATA, batch=8, timeout=TIMEOUT)
        for epoch in run.epochs(2):
            for (x,) in run.batches(epoch):
                ring_is_slow(run, run.rank)
                optimizer.zero_grad()
                outputs = model(x) if is_called else model[0](x)
                torch.autograd.backward(run.mean(outputs.square().sum(1)))
                optimizer.step()
        advice = run.report().advice
        left_out = {} if advice is None else dict(advice.left_out)
        run.close()
        return {"sync": str(run.plan), "left_out": left_out}

    with advice([("ddp", 5.0), ("ring", SLOW)]):
        ranks = on_ranks(2, work)
    assert one_value(ranks, "sync") == "ring"
    assert "uses every parameter, at every step" in ranks[0]["left_out"]["ddp"]


def test_codes_are_left_out_where_training_would_be_another() -> None:
    cases: dict[str, tuple[list[nn.Module], bool, bool]] = {
        "plain": ([], True, False),
        "dropout": ([nn.Dropout(0.5)], True, False),
        "shared": ([nn.Dropout(0.5)], True, True),
        "norm": ([nn.BatchNorm1d(4)], True, True),
        "unweighed": ([], False, False),
    }

    def ended(layers: list[nn.Module], weighs: bool, shares: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*layers, nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        run = attach(model, optimizer, plan="auto", data=DATA, batch=8, timeout=TIMEOUT)
        for epoch in run.epochs(2):
            for (x,) in run.batches(epoch):
                ring_is_slow(run, run.rank)
                optimizer.zero_grad()
                with run.shared_random() if shares else nullcontext():
                    losses = model(x).square().sum(1)
                torch.autograd.backward(run.mean(losses) if weighs else losses.mean())
                optimizer.step()
        advice = run.report().advice
        left_out = {} if advice is None else dict(advice.left_out)
        run.close()
        return {"sync": str(run.plan), "left_out": left_out}

    code = "gc(stragglers=1)"
    with advice([(code, 5.0), ("ring", SLOW)]):
        ranks = on_ranks(2, lambda rank: {name: ended(*case) for name, case in cases.items()})
    assert [one["left_out"].get(code, "") for one in ranks[0].values()] == [
        "",
        "dropout (0) drops something else on each worker, so the result "
        "depends on which worker straggles",
        "",
        "batch norm (0) normalises over each worker's own samples, and its statistics are each "
        "worker's own",
        f"{code} needs losses weighted by run.mean",
    ]
    for rank in ranks:
        assert [one["sync"] for one in rank.values()] == [code, "ring", code, "ring", "ring"]


def test_protection_is_never_lowered() -> None:
    """Neither by the choice nor by what is measured for it; nor by an entry that says otherwise,
    which every rank refuses."""
    asked: list[bool] = []

    def calibrated(*_: Any, native: bool, **__: Any) -> None:
        asked.append(native)
        raise NotFitted("nothing is measured here", "")

    def work(rank: int) -> dict[str, Any]:
        os.environ["THALWEG_ENCRYPTION"] = "on"
        with patch.object(RunCalibrator, "calibrate", MEASURES):
            trained(rank, steps=FIRST + 1)
        chosen = trained(rank, steps=12)
        with patch.object(Run, "_refuse_for_auto", lambda run, plan: None):
            forged = raised(lambda: trained(rank, steps=12))
        return {**chosen, "forged": forged, "asked": asked, "gloo": dist.is_initialized()}

    with (
        patch("thalweg.training.auto.measurement.calibrate", calibrated),
        advice([("ddp", 5.0), ("ring", SLOW)]),
    ):
        results = on_ranks(2, work)
    assert one_value(results, "plans")[-1] == "ring"
    assert results[0]["left_out"]["ddp"].startswith("ddp would send over torch's own connections")
    assert one_value(results, "asked") == [False]
    for result in results:
        assert result["forged"]["kind"] == "PlanError"
    assert one_value(results, "gloo") is False


def test_what_it_says_is_what_it_does() -> None:
    """Where nothing exact gains 5 % on DDP; and what more could be had is said too."""
    results = on_ranks(2, lambda rank: trained(rank, steps=FIRST + 2))
    plan = one_value(results, "plans")[-1]
    lines = [line for line in results[0]["said"] if "DDP" in line or line.startswith("from step")]
    assert lines == [results[0]["verdict"]]
    assert lines[0].startswith(f"from step {FIRST}: {plan} (")
    assert "; with auto(allow=lossy): ring+" in lines[0]


def test_the_settings_that_it_was_given_are_kept() -> None:
    with advice([("tree", 5.0), ("ring", SLOW)]):
        results = on_ranks(2, lambda rank: trained(rank, "auto @ bucket=100B"))
    assert set(one_value(results, "plans")) == {"ring @ bucket=100B", "tree @ bucket=100B"}


def test_a_script_that_switches_has_chosen() -> None:
    def before(run: Run, rank: int) -> None:
        if rank == 1 and run.step == 2:
            run.switch("double_tree")

    with advice([("tree", 5.0), ("ring", SLOW)]):
        results = on_ranks(2, lambda rank: trained(rank, before=before))
    assert one_value(results, "plans") == ["ring"] * 8 + ["double_tree"] * 22


def test_a_resumed_run_chooses_anew(tmp_path: Path) -> None:
    with advice([("tree", 5.0), ("ring", SLOW)]):
        whole = on_ranks(2, lambda rank: trained(rank, resume=tmp_path / "whole", steps=40))
        on_ranks(2, lambda rank: trained(rank, resume=tmp_path / "cut", steps=20))
        saved = json.loads((tmp_path / "cut" / "step-00000020" / "checkpoint.json").read_text())
        assert saved["content"]["plan"] == "tree"
        rest = on_ranks(2, lambda rank: trained(rank, resume=tmp_path / "cut", steps=40))
    assert one_value(rest, "first") == 20
    assert one_value(rest, "plans") == ["ring"] * 8 + ["tree"] * 12
    assert rest[0]["values"] == pytest.approx(whole[0]["values"], abs=1e-6)


def test_a_ddp_object_keeps_its_plan() -> None:
    def work(rank: int) -> dict[str, Any]:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(nn.Linear(2, 1))
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        refused = raised(lambda: attach(model, sgd, plan="auto", timeout=TIMEOUT))
        dist.destroy_process_group()
        return refused

    results = on_ranks(2, work)
    assert one_value(results, "kind") == "PlanError"
    assert one_value(results, "text").startswith(
        "a DDP object can't change its plan, and auto does"
    )


def test_alone_there_is_nothing_to_choose() -> None:
    result = trained(0, "auto", steps=20)
    assert set(result["plans"]) == {"ring"}
    assert result["choices"] == []


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["auto", "auto(allow=lossy)", "auto(allow=eventual)"])
def test_by_what_is_measured(sync: str) -> None:
    """Links, roads, compressors and this job: all ranks come to the same."""
    with patch.object(RunCalibrator, "calibrate", MEASURES):
        results = on_ranks(SIZE, lambda rank: trained(rank, sync, steps=60))
    plans = one_value(results, "plans")
    assert plans[:FIRST] == ["ring"] * FIRST
    choices = one_value(results, "choices")
    assert choices[0][0] == FIRST
    assert any("measured" in line for line in results[0]["said"])
    if sync != "auto(allow=eventual)":
        assert same_bits(results)

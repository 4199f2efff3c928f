from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest

from thalweg.bench.comparison import TrainingRun, row_of, row_of_failure
from thalweg.bench.scenario import Scenario, Target
from thalweg.facts import Cluster
from thalweg.lab import Event
from thalweg.lab.event import AppliedEvent
from thalweg.workloads import parse_job

EVENT = Event(action="cut", at_step=4, rack=0)
SCENARIO = Scenario(
    name="small",
    cluster=Cluster.flat(2),
    job=parse_job("synthetic(params=1k)"),
    steps=22,
    syncs=("ring",),
    warmup=2,
    target=Target(metric="loss", value=0.5),
    events=(EVENT,),
)


def result(seconds: list[float], first_step: int = 0, **other: Any) -> dict[str, Any]:
    defaults = {
        "first_step": first_step,
        "steps": [first_step + 1 + number for number in range(len(seconds))],
        "losses": [1.0] * len(seconds),
        "seconds": seconds,
        "evaluations": [],
        "metric": 0.4,
        "deviation": 0.0,
        "fingerprint": "same",
        "adjustments": [],
    }
    return {**defaults, **other}


def test_warmup_and_steps_after_an_event_do_not_count() -> None:
    slow_start = [9.0, 9.0]
    before, settling, after = [1.0, 2.0], [50.0] * 15, [3.0, 4.0, 5.0]
    one = result([*slow_start, *before, *settling, *after])
    trial = TrainingRun(results=[one, one], fired=[AppliedEvent(event=EVENT, seconds=1.0, step=4)])
    row = row_of("ring", SCENARIO, [trial])
    assert row["seconds_per_step"] == pytest.approx(3.0)
    assert row["seconds_all"] == pytest.approx(18 + 3 + 750 + 12)
    assert row["events"] == [{"event": "step 4: cut rack 0", "steps": [4]}]


def test_what_a_step_takes_each_host_before_and_after_the_events() -> None:
    before, settling = [9.0, 9.0, 1.0, 2.0], [50.0] * 15
    one, other = result([*before, *settling, 3.0, 4.0, 5.0]), result([*before, *settling, 6, 6, 6])
    made = [{"step": 8, "kept_apart": "rack0 every 4 steps", "reason": "it is slow"}]
    fired = [AppliedEvent(event=EVENT, seconds=1.0, step=4)]
    trial = TrainingRun(results=[{**one, "adjustments": made}, other, None], fired=fired)
    row = row_of("ring", replace(SCENARIO, cluster=Cluster.flat(3)), [trial])
    assert [(p["host"], p["before"], p["after"]) for p in row["pace"]] == [
        ("host0", 1.5, 4.0),
        ("host1", 1.5, 6.0),
        ("host2", None, None),  # it was killed
    ]
    assert row["adjustments"] == [made]


def test_the_mean_is_over_ranks_steps_and_repeats() -> None:
    quiet = replace(SCENARIO, events=(), steps=4)
    first = TrainingRun(results=[result([0, 0, 1.0, 2.0]), result([0, 0, 3.0, 4.0])])
    second = TrainingRun(results=[result([0, 0, 5.0, 5.0]), result([0, 0, 5.0, 5.0])])
    row = row_of("ring", quiet, [first, second])
    assert row["seconds_per_step"] == pytest.approx(30 / 8)
    assert [repeat["seconds_per_step"] for repeat in row["repeats"]] == [2.5, 5.0]
    assert row["seconds"] == pytest.approx([0, 0, 3.5, 4.0])


def test_training_takes_as_long_as_the_slowest_between_two_evaluations() -> None:
    quiet = replace(SCENARIO, events=(), steps=4)
    evaluations = [[2, 0.6], [4, 0.5]]
    trial = TrainingRun(
        results=[
            result([1.0, 1.0, 5.0, 5.0], evaluations=evaluations),
            result([2.0, 2.0, 1.0, 1.0], evaluations=evaluations),
        ]
    )
    row = row_of("ring", quiet, [trial])
    assert row["seconds_all"] == row["seconds_to_target"] == pytest.approx(14.0)


def test_repeats_that_never_reach_the_target_are_left_out() -> None:
    quiet = replace(SCENARIO, events=(), steps=4)
    met = TrainingRun(results=[result([1.0] * 4, evaluations=[[2, 0.1], [4, 0.1]])])
    missed = TrainingRun(results=[result([1.0] * 4, evaluations=[[2, 0.9], [4, 0.9]])])
    assert row_of("ring", quiet, [met, missed])["seconds_to_target"] == pytest.approx(2.0)
    assert row_of("ring", quiet, [missed])["seconds_to_target"] is None


def test_drift_is_the_root_of_the_mean_square() -> None:
    quiet = replace(SCENARIO, events=(), steps=3)
    ranks = [result([1.0] * 3, deviation=d, fingerprint=str(d)) for d in (0.1, 0.3)]
    row = row_of("dssync", quiet, [TrainingRun(results=ranks)])
    assert row["drift"] == pytest.approx(sqrt((0.01 + 0.09) / 2))
    assert not row["replicas_equal"]


def test_a_worker_that_was_killed_has_nothing_to_say() -> None:
    quiet = replace(SCENARIO, events=(), steps=3)
    late = result([2.0], first_step=2, losses=[3.0])
    trial = TrainingRun(results=[result([1.0, 1.0, 1.0]), None, {}, late])
    row = row_of("ring", quiet, [trial])
    assert row["losses"] == pytest.approx([1.0, 1.0, 2.0])
    assert row["seconds_per_step"] == pytest.approx(1.5)


def test_a_failure_has_the_columns_of_the_others() -> None:
    row = row_of("ring", replace(SCENARIO, events=()), [TrainingRun(results=[result([1.0] * 22)])])
    failure = row_of_failure("umw", "rank 2 was killed; look")
    assert failure.keys() <= row.keys()
    assert failure["error"] == "rank 2 was killed; look"
    assert failure["seconds_per_step"] is None

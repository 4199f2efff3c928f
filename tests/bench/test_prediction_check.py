"""Predictions of a scenario: phases between events, and how close they came."""

from dataclasses import replace
from typing import Any

import pytest

from thalweg import Cluster, Estimate, Situation, Workload, predict
from thalweg.bench.prediction_check import (
    accuracy_of,
    auto_choices,
    predict_scenario,
    prediction_rows,
)
from thalweg.bench.scenario import Scenario
from thalweg.facts import Duration, Machine, Rate, Size
from thalweg.facts.situation import scaled
from thalweg.lab import Event
from thalweg.workloads import find_job

DECLARED = Cluster.regular([2, 2], nic="100mbit", uplink="100mbit", latency=Duration(0.0))
WORKLOAD = Workload.of_size(Size.parse("1MB"))


def scenario(*events: Event) -> Scenario:
    return Scenario(
        name="test",
        cluster=DECLARED,
        events=events,
        job=find_job("synthetic(params=250k)"),
        steps=60,
        syncs=("ring",),
        warmup=10,
    )


def situation(found: Cluster = DECLARED) -> Situation:
    return Situation(cluster=found, machine=Machine(), workload=WORKLOAD, declared=DECLARED)


def forecast(*events: Event, sync: str = "ring", found: Cluster = DECLARED) -> Estimate:
    estimate = predict_scenario(scenario(*events), sync, situation(found))
    assert estimate is not None
    return estimate


def degraded(**rates: str) -> Cluster:
    slower = [replace(rack, uplink=None) for rack in DECLARED.racks]
    made = Cluster.regular([2, 2], nic="100mbit", uplink=[rates["first"], rates["second"]])
    return replace(
        DECLARED,
        racks=tuple(replace(a, uplink=b.uplink) for a, b in zip(slower, made.racks, strict=True)),
    )


def test_without_events_it_is_the_plans_prediction() -> None:
    found = forecast()
    assert found.seconds == pytest.approx(predict("ring", situation()).seconds)


def test_a_slower_uplink_counts_for_the_steps_after_it() -> None:
    """Steps 11 to 20 count before the event after step 20, and 36 to 60 after it."""
    event = Event(action="degrade", at_step=20, rack=0, rate=Rate.parse("20mbit"))
    slow = degraded(first="20mbit", second="100mbit")
    before, after = (predict("ring", situation(found)).seconds for found in (DECLARED, slow))
    found = forecast(event)
    assert found.seconds == pytest.approx((10 * before + 25 * after) / 35)
    assert after > 3 * before


def test_what_is_restored_is_as_before() -> None:
    events = (
        Event(action="degrade", at_step=1, rack=0, rate=Rate.parse("20mbit")),
        Event(action="restore", at_step=2, rack=0),
    )
    found = forecast(*events)
    assert found.seconds == pytest.approx(predict("ring", situation()).seconds)


def test_links_give_the_share_of_their_rate_that_was_measured() -> None:
    event = Event(action="degrade", at_step=1, rack=0, rate=Rate.parse("20mbit"))
    full = forecast(event)
    half = forecast(event, found=scaled(DECLARED, 0.5))
    assert half.seconds == pytest.approx(2 * full.seconds, rel=1e-3)


def test_an_uplink_that_was_never_full_can_become_slow() -> None:
    unlimited = replace(
        DECLARED, racks=tuple(replace(rack, uplink=None) for rack in DECLARED.racks)
    )
    event = Event(action="degrade", at_step=1, rack=0, rate=Rate.parse("20mbit"))
    found, known = forecast(event, found=unlimited), forecast(event)
    assert found.seconds == pytest.approx(known.seconds)


def test_what_happened_before_the_probe_was_measured() -> None:
    """An uplink of a fifth, which is restored: before that as measured, after it as declared."""
    slow = degraded(first="20mbit", second="100mbit")
    at_first = Event(action="degrade", at_step=0, rack=0, rate=Rate.parse("20mbit"))
    found = forecast(at_first, found=slow)
    assert found.seconds == pytest.approx(predict("ring", situation(slow)).seconds)
    restored = Event(action="restore", at_step=1, rack=0)
    found = forecast(at_first, restored, found=slow)
    assert found.seconds == pytest.approx(predict("ring", situation()).seconds)


def test_plans_that_adjust_are_predicted_as_adjusted() -> None:
    """A host that becomes slow is kept apart under dssync, unless its table is fixed."""
    event = Event(action="degrade", at_step=1, host=1, rate=Rate.parse("10mbit"))
    adjusted = forecast(event, sync="dssync")
    fixed = forecast(event, sync="dssync(adjust=false)")
    assert adjusted.seconds < 0.8 * fixed.seconds


def test_other_events_are_not_predicted() -> None:
    flows = scenario(Event(action="flow", at_step=20, rack=0))
    assert predict_scenario(flows, "ring", situation()) is None


def test_accuracy_by_hand() -> None:
    def one(predicted: float, measured: float) -> dict[str, Any]:
        found = row("ring", "exact", [], predicted_low=0.9, predicted_high=1.1)
        return {**found, "predicted_seconds_per_step": predicted, "seconds_per_step": measured}

    rows = [one(1.0, 1.0), one(1.0, 0.8), one(1.05, 1.0), one(1.0, 2.0)]
    found = accuracy_of(prediction_rows(scenario(), rows))
    assert found["predictions"] == 4
    assert found["median"] == pytest.approx((0.05 + 0.25) / 2)
    assert found["within"] == pytest.approx(0.5)
    assert found["covered"] == pytest.approx(0.5)


def row(sync: str, promise: str, seconds: list[float], **more: Any) -> dict[str, Any]:
    return {
        "sync": sync,
        "promise": promise,
        "seconds": seconds,
        "seconds_per_step": 1.0,
        "predicted_seconds_per_step": 1.1,
        "predicted_low": 1.0,
        "predicted_high": 1.2,
        "error": None,
        **more,
    }


def test_auto_is_put_beside_the_best_of_its_class_by_the_last_steps() -> None:
    asked = replace(scenario(), syncs=("ring", "dssync", "auto(allow=exact)"))
    chosen = [[{"sync": "double_tree"}]]
    rows = [
        row("ring", "exact", [9.0] * 35 + [2.0] * 25),
        row("dssync", "eventual", [1.0] * 60),
        row("auto(allow=exact)", "exact", [5.0] * 35 + [2.2] * 25, choices=chosen),
    ]
    [found] = auto_choices(asked, rows)
    assert (found["chosen"], found["best"]) == ("double_tree", "ring")
    assert found["behind"] == pytest.approx(0.1)


def test_auto_alone_is_put_beside_nothing() -> None:
    """Or where all that were named have failed."""
    asked = replace(scenario(), syncs=("ring", "auto(allow=exact)"))
    auto = row("auto(allow=exact)", "exact", [2.0] * 60, choices=[[]])
    assert auto_choices(asked, [auto]) == []
    assert auto_choices(asked, [row("ring", "exact", [], error="no"), auto]) == []


def test_what_was_not_predicted_is_not_checked() -> None:
    asked = replace(scenario(), syncs=("ring", "umw", "auto(allow=exact)"))
    rows = [
        row("ring", "exact", [1.0]),
        row("umw", "exact", [1.0], predicted_seconds_per_step=None),
        row("auto(allow=exact)", "exact", [1.0]),
    ]
    assert [one["sync"] for one in prediction_rows(asked, rows)] == ["ring"]


def test_averages_every_few_steps_count_as_often_as_they_are_among_the_steps() -> None:
    """Of the steps 11 to 60 every eighth is one: 16, 24, ... 56, six of fifty."""
    plan = "local_sgd(every=8)"
    exposed = predict(plan, situation()).parts.transfer
    found = forecast(sync=plan)
    assert found.parts.transfer == pytest.approx(exposed * 8 * 6 / 50)

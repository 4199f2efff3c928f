"""Predicted step times of a scenario's plans, compared with the measured ones.

Before plans are compared, fresh workers measure links, messages and codecs in the scenario's own
place, and profile a few steps without synchronisation (compute time, when gradients are ready,
stragglers). Every plan is predicted from that calibration alone, not from the compared runs.

An event that changes a link's rate changes the prediction from its step on, in the measured
proportion; events at step 0 come before the calibration, which has seen them. A scenario with any
other event isn't predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from operator import attrgetter, itemgetter
from statistics import fmean, median
from typing import Any

from thalweg import lab as labs
from thalweg.bench.calibrate_job import calibrate_at
from thalweg.bench.run_everywhere import Deployment, NotedProgress
from thalweg.bench.scenario import Scenario
from thalweg.bench.simulated_compute import SimulatedCompute
from thalweg.catalog import parse_plan
from thalweg.declarations import Promise
from thalweg.facts import Cluster, Link, Rate, Situation
from thalweg.lab import Event
from thalweg.plan import Plan
from thalweg.predict import Breakdown, Estimate, Outcome, predict

PROFILE_SECONDS = 8.0
MIN_PROFILE_STEPS, MAX_PROFILE_STEPS = 20, 120
PROFILE_STRAGGLER_SEED = 1009  # differs from the seeds of the compared runs
RATE_EVENT_ACTIONS = ("degrade", "restore")  # events that change only the rate of a link
MAX_PREDICTION_ERROR_RATIO = 0.15
STEADY_TAIL_STEPS = 25  # the last steps, when `auto` has chosen
Row = dict[str, Any]


def predict_scenario(scenario: Scenario, sync: str, situation: Situation) -> Estimate | None:
    """The mean step time over the counted steps; None if an event can't be predicted."""
    if any(
        event.action not in RATE_EVENT_ACTIONS or event.at_step is None for event in scenario.events
    ):
        return None
    counted = set(scenario.counted(event.at_step for event in scenario.events))
    plan = parse_plan(sync)
    adjusts = bool(plan.topology.arguments.get("adjust"))  # to the events
    estimates = []
    for number, (cluster, phase) in enumerate(_phases(scenario, situation)):
        if steps := [step for step in phase if step in counted]:
            known = None if adjusts and number else situation.declared
            estimate = predict(plan, replace(situation, cluster=cluster, declared=known))
            estimates.append((_with_cadence(plan, steps, estimate), len(steps)))
    return _mean(estimates)


def _phases(scenario: Scenario, situation: Situation) -> Iterator[tuple[Cluster, range]]:
    """The cluster between two events, and the steps in which it is like that."""
    measured, declared = situation.cluster, situation.laid_out_for
    at_calibration = declared.rates()
    for event in scenario.events:
        at_calibration |= {} if event.at_step else _declared_after(event, declared)
    rates = _measured_rates(measured.rates(), at_calibration)
    ratios = {
        link: rates[link].bits_per_second / rate.bits_per_second
        for link, rate in at_calibration.items()
    }
    first = 1
    later = [(event.at_step, event) for event in scenario.events if event.at_step]
    for step, event in sorted(later, key=itemgetter(0)):
        yield measured.with_rates(rates), range(first, step + 1)
        first = step + 1
        for link, rate in _declared_after(event, declared).items():
            rates[link] = Rate(ratios[link] * rate.bits_per_second)
    yield measured.with_rates(rates), range(first, scenario.steps + 1)


def _measured_rates(
    measured: Mapping[Link, Rate], declared: Mapping[Link, Rate]
) -> dict[Link, Rate]:
    """The measured rate of each link; a link that was never saturated gets the median ratio."""
    ratio = median(
        measured[link].bits_per_second / declared[link].bits_per_second for link in measured
    )
    return {
        link: measured.get(link, Rate(rate.bits_per_second * ratio))
        for link, rate in declared.items()
    }


def _declared_after(event: Event, cluster: Cluster) -> dict[Link, Rate]:
    """The declared rates of an event's links after it."""
    rates = cluster.rates()
    return {
        link: rates[link] if event.rate is None else event.rate for link in event.links(cluster)
    }


def calibrate_scenario(scenario: Scenario, lab: labs.Lab, progress: NotedProgress) -> Situation:
    """The situation in the scenario's lab after the events at step 0, measured with fresh workers;
    it declares the scenario's cluster."""
    job = replace(scenario.job, batch=scenario.batch or scenario.job.batch)
    expected = scenario.compute.step.seconds or PROFILE_SECONDS / MAX_PROFILE_STEPS
    precisions = [parse_plan(sync).precision for sync in scenario.syncs]
    lab.restore()
    calibration = calibrate_at(
        Deployment.of_lab(lab),
        job,
        scenario.cluster,
        list(dict.fromkeys(precision for precision in precisions if precision is not None)),
        progress,
        steps=round(min(MAX_PROFILE_STEPS, max(MIN_PROFILE_STEPS, PROFILE_SECONDS / expected))),
        injection=SimulatedCompute(
            compute=scenario.compute, cluster=scenario.cluster, seed=PROFILE_STRAGGLER_SEED
        ),
        director=lab.director(event for event in scenario.events if event.at_step == 0),
    )
    assert calibration is not None  # this process is no launched rank
    situation = calibration.situation
    sleeps = scenario.compute.step.seconds > 0  # which leaves the cores to codecs
    contention = 0.0 if sleeps else 1.0
    return replace(situation, machine=replace(situation.machine, contention=contention))


def _with_cadence(plan: Plan, steps: Sequence[int], estimate: Estimate) -> Estimate:
    """The estimate with the number of exchanges in these steps, if the plan skips some steps."""
    every, parts = plan.cadence.every, estimate.parts
    if every == 1 or plan.cadence.inside:
        return estimate
    frequency = every * fmean(step % every == 0 for step in steps)
    changed = replace(parts, transfer=parts.transfer * frequency)
    more = changed.seconds - parts.seconds
    return replace(estimate, parts=changed, low=estimate.low + more, high=estimate.high + more)


def _mean(estimates: Sequence[tuple[Estimate, int]]) -> Estimate:
    """The mean of the estimates, weighted by their numbers of steps."""

    def mean(name: str) -> float:
        weighted = (attrgetter(name)(estimate) * steps for estimate, steps in estimates)
        return float(sum(weighted) / total)

    total = sum(steps for _, steps in estimates)
    parts = Breakdown(**{field.name: mean(f"parts.{field.name}") for field in fields(Breakdown)})
    return replace(estimates[0][0], parts=parts, low=mean("low"), high=mean("high"))


def auto_plans(scenario: Scenario) -> list[str]:
    """The scenario's plans that are `auto`, for which there is no prediction."""
    return [sync for sync in scenario.syncs if parse_plan(sync).topology.name == "auto"]


def prediction_rows(scenario: Scenario, rows: Sequence[Row]) -> list[Row]:
    """The predicted step time, its 80 % interval and the measured step time of each fixed plan."""
    automatic = auto_plans(scenario)
    predictions = []
    for row in rows:
        predicted, measured = row.get("predicted_seconds_per_step"), row["seconds_per_step"]
        if row["sync"] in automatic or not predicted or not measured:
            continue
        outcome = Outcome(
            sync=row["sync"],
            predicted=predicted,
            low=row["predicted_low"],
            high=row["predicted_high"],
            measured=measured,
        )
        verdict = {"error": outcome.error, "covered": outcome.covered}
        predictions.append({"scenario": scenario.name, **asdict(outcome), **verdict})
    return predictions


def accuracy_of(predictions: Sequence[Row]) -> Row:
    """The median absolute error, and the fractions within 15 % and within their intervals."""
    errors = [abs(row["error"]) for row in predictions]
    return {
        "predictions": len(predictions),
        "median": median(errors),
        "within": fmean(error <= MAX_PREDICTION_ERROR_RATIO for error in errors),
        "covered": fmean(row["covered"] for row in predictions),
    }


def auto_choices(scenario: Scenario, rows: Sequence[Row]) -> list[Row]:
    """The choice of each successful `auto`, and the best fixed plan with no weaker a promise, by
    their last steps; no row if there is no such plan."""
    promises = list(Promise)
    automatic = auto_plans(scenario)
    succeeded = [(row, promises.index(Promise(row["promise"]))) for row in rows if not row["error"]]
    outcomes = []
    for row, allowed in succeeded:
        others = [
            r for r, promise in succeeded if r["sync"] not in automatic and promise <= allowed
        ]
        if row["sync"] not in automatic or not others:
            continue
        best = min(others, key=steady_step_seconds)
        seconds, best_seconds = steady_step_seconds(row), steady_step_seconds(best)
        outcomes.append(
            {
                "scenario": scenario.name,
                "sync": row["sync"],
                "chosen": row["choices"][0][-1]["sync"] if row["choices"][0] else "ring",
                "seconds": seconds,
                "best": best["sync"],
                "best_seconds": best_seconds,
                "behind": seconds / best_seconds - 1,
            }
        )
    return outcomes


def steady_step_seconds(row: Row) -> float:
    """The mean step time of the last steps."""
    return fmean(row["seconds"][-STEADY_TAIL_STEPS:])

"""The metrics of a plan in a scenario: one row from the steps of every worker in every run.

    seconds_per_step   mean over ranks, counted steps and repeats
    seconds_to_target  training time until the target was reached; mean over the repeats that did
    seconds_all        time of all steps of a run; mean over repeats
    backward_seconds, exposed_seconds, codec_seconds
                       of the counted steps: from the first gradient to the last, from there to the
                       last average, and CPU time of compressing; where the plan has common steps
    drift              sqrt(mean over ranks of (|x_i - mean| / |mean|)^2) of the parameters x

Warm-up steps and the steps after an event aren't counted, and evaluations take no part. All ranks
wait for one another at each evaluation, so the training time between two evaluations is that of the
slowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, quantiles
from typing import Any

from thalweg.bench.scenario import Scenario
from thalweg.lab.event import AppliedEvent

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One run: the workers' results by rank, empty for a killed worker, and the applied events."""

    results: Sequence[Result | None]
    fired: Sequence[AppliedEvent] = ()

    @property
    def reported(self) -> list[Result]:
        """The results of the workers that finished."""
        return [result for result in self.results if result]

    def by_step(self, key: str) -> dict[int, float]:
        """Seconds or losses by step: the mean over the ranks that took it."""
        series = [_steps(result, key) for result in self.reported]
        steps = sorted(set().union(*series))
        return {step: fmean(each[step] for each in series if step in each) for step in steps}

    def counted(self, scenario: Scenario) -> set[int]:
        return set(scenario.counted(fired.step for fired in self.fired))


def row_of(sync: str, scenario: Scenario, trials: Sequence[TrainingRun]) -> dict[str, Any]:
    """The metrics of all repeats together and of each, and the series for a plot."""
    counted = [_counted(scenario, trial) for trial in trials]
    pooled = [seconds for one in counted for seconds in one]
    to_target = [_seconds_to_target(scenario, trial) for trial in trials]
    everything = [_seconds_until(trial, scenario.steps) for trial in trials]
    metrics = [trial.reported[0]["metric"] for trial in trials]
    drifts = [_drift(trial) for trial in trials]
    return {
        "sync": sync,
        "seconds_per_step": fmean(pooled) if pooled else None,
        "predicted_seconds_per_step": None,
        "seconds_to_target": _mean_of_known(to_target),
        "seconds_all": fmean(everything),
        "metric": fmean(metrics),
        "drift": fmean(drifts),
        **_step_parts(scenario, trials),
        "error": None,
        "replicas_equal": all(_equal(trial) for trial in trials),
        "quartiles": quantiles(pooled, n=4) if len(pooled) > 1 else None,
        "repeats": [
            {
                "seconds_per_step": fmean(one) if one else None,
                "seconds_to_target": target,
                "seconds_all": whole,
                "metric": metric,
                "drift": drift,
                "evaluations": trial.reported[0]["evaluations"],
            }
            for trial, one, target, whole, metric, drift in zip(
                trials, counted, to_target, everything, metrics, drifts, strict=True
            )
        ],
        "losses": _over_repeats(trials, "losses"),
        "seconds": _over_repeats(trials, "seconds"),
        "events": _events(scenario, trials),
        "adjustments": [trial.reported[0]["adjustments"] for trial in trials],
        "choices": [trial.reported[0].get("choices", []) for trial in trials],
        "late": [trial.reported[0].get("late", []) for trial in trials],
        "pace": _pace(scenario, trials),
    }


def _step_parts(scenario: Scenario, trials: Sequence[TrainingRun]) -> dict[str, float | None]:
    timings = [
        timing
        for trial in trials
        for counted in [trial.counted(scenario)]
        for result in trial.reported
        for timing in result.get("timings", ())
        if timing["step"] + 1 in counted
    ]
    return {
        f"{part}_seconds": fmean(timing[part] for timing in timings) if timings else None
        for part in ("backward", "exposed", "codec")
    }


def _pace(scenario: Scenario, trials: Sequence[TrainingRun]) -> list[dict[str, Any]]:
    """The step time of each host before the first event and after the last."""
    paces: dict[int, tuple[list[float], list[float]]] = {}
    for trial in trials:
        events = [fired.step for fired in trial.fired if fired.step is not None]
        if not events:
            continue
        counted = scenario.counted(events)
        for rank, result in enumerate(trial.results):
            seconds = _steps(result, "seconds") if result else {}
            before, after = paces.setdefault(rank, ([], []))
            before += [seconds[s] for s in counted if s in seconds and s <= min(events)]
            after += [seconds[s] for s in counted if s in seconds and s > max(events)]
    return [
        {
            "rank": rank,
            "host": scenario.cluster.host(rank).name,
            "before": fmean(before) if before else None,
            "after": fmean(after) if after else None,
        }
        for rank, (before, after) in sorted(paces.items())
    ]


def row_of_failure(sync: str, error: str) -> dict[str, Any]:
    step = ("seconds_per_step", "predicted_seconds_per_step")
    unknown = (*step, "seconds_to_target", "seconds_all", "metric", "drift")
    return {"sync": sync, **dict.fromkeys(unknown), "error": error}


def _steps(result: Result, key: str) -> dict[int, float]:
    """One worker's seconds or losses by step, from 1."""
    return dict(zip(result["steps"], result[key], strict=True))


def _counted(scenario: Scenario, trial: TrainingRun) -> list[float]:
    """The seconds of every counted step of every rank."""
    steps = trial.counted(scenario)
    return [
        seconds
        for result in trial.reported
        for step, seconds in _steps(result, "seconds").items()
        if step in steps
    ]


def _seconds_to_target(scenario: Scenario, trial: TrainingRun) -> float | None:
    if scenario.target is None:
        return None
    for step, value in trial.reported[0]["evaluations"]:
        if scenario.target.reached_by(value):
            return _seconds_until(trial, step)
    return None


def _seconds_until(trial: TrainingRun, last: int) -> float:
    """The training time up to this step."""
    evaluated = [step for step, _ in trial.reported[0]["evaluations"] if step < last]
    intervals = zip([0, *evaluated], [*evaluated, last], strict=True)
    series = [_steps(result, "seconds") for result in trial.reported]
    return sum(
        max(sum(each.get(step, 0.0) for step in range(start + 1, end + 1)) for each in series)
        for start, end in intervals
    )


def _drift(trial: TrainingRun) -> float:
    return sqrt(fmean(result["deviation"] ** 2 for result in trial.reported))


def _equal(trial: TrainingRun) -> bool:
    return len({result["fingerprint"] for result in trial.reported}) == 1


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _over_repeats(trials: Sequence[TrainingRun], key: str) -> list[float]:
    """The mean over repeats of the mean over ranks, by step."""
    series = [trial.by_step(key) for trial in trials]
    steps = sorted(set.intersection(*map(set, series)))
    return [fmean(each[step] for each in series) for step in steps]


def _events(scenario: Scenario, trials: Sequence[TrainingRun]) -> list[dict[str, Any]]:
    """The step of the slowest rank after which each event was applied, in each repeat."""
    return [
        {
            "event": str(event),
            "steps": [f.step for trial in trials for f in trial.fired if f.event == event],
        }
        for event in scenario.events
    ]

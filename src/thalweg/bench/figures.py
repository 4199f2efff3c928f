"""What the runs of a plan say: from every worker's steps to one row.

    seconds_per_step   mean over ranks, steps and repeats; without the first steps and those that
                       follow an event
    seconds_to_target  training until the target was met; mean over the repeats that met it
    seconds_all        all steps of a run; mean over repeats
    drift              sqrt(mean over ranks of (|x_i - mean| / |mean|)^2) of the parameters x

Evaluations take no part in any of them. At each all ranks wait for one another, so training took
as long as, stretch by stretch, its slowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, quantiles
from typing import Any

from thalweg.bench.scenario import Scenario

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run: what each worker that lived to its end has to say, and after which of its steps
    each event came, None if it hasn't."""

    results: Mapping[int, Result]
    happened: Mapping[int, Sequence[int | None]] = field(default_factory=dict)

    def steps_of(self, rank: int, key: str) -> dict[int, float]:
        """Seconds or losses by step, from 1."""
        result = self.results[rank]
        return dict(enumerate(result[key], start=result["first_step"] + 1))

    def by_step(self, key: str) -> dict[int, float]:
        """Their mean over the ranks that took the step."""
        courses = [self.steps_of(rank, key) for rank in self.results]
        steps = sorted(set().union(*courses))
        return {step: fmean(c[step] for c in courses if step in c) for step in steps}

    @property
    def first(self) -> Result:
        return next(iter(self.results.values()))


def row_of(sync: str, scenario: Scenario, trials: Sequence[Trial]) -> dict[str, Any]:
    """Figures of all repeats together, those of each, and the course for a picture."""
    counted = [_counted(scenario, trial) for trial in trials]
    pooled = [seconds for one in counted for seconds in one]
    to_target = [_seconds_to_target(scenario, trial) for trial in trials]
    everything = [_seconds_until(trial, scenario.steps) for trial in trials]
    metrics = [trial.first["metric"] for trial in trials]
    drifts = [_drift(trial) for trial in trials]
    return {
        "sync": sync,
        "seconds_per_step": fmean(pooled) if pooled else None,
        "predicted_seconds_per_step": None,
        "seconds_to_target": _mean_of_known(to_target),
        "seconds_all": fmean(everything),
        "metric": fmean(metrics),
        "drift": fmean(drifts),
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
                "evaluations": trial.first["evaluations"],
            }
            for trial, one, target, whole, metric, drift in zip(
                trials, counted, to_target, everything, metrics, drifts, strict=True
            )
        ],
        "losses": _over_repeats(trials, "losses"),
        "seconds": _over_repeats(trials, "seconds"),
        "events": _events(scenario, trials),
    }


def row_of_failure(sync: str, error: str) -> dict[str, Any]:
    figures = (
        "seconds_per_step",
        "predicted_seconds_per_step",
        "seconds_to_target",
        "seconds_all",
        "metric",
        "drift",
    )
    return {"sync": sync, **dict.fromkeys(figures), "error": error}


def _counted(scenario: Scenario, trial: Trial) -> list[float]:
    """Seconds of every step of every rank that counts."""
    found = []
    for rank in trial.results:
        seconds = trial.steps_of(rank, "seconds")
        steps = scenario.counted(trial.happened.get(rank, ()))
        found += [seconds[step] for step in steps if step in seconds]
    return found


def _seconds_to_target(scenario: Scenario, trial: Trial) -> float | None:
    if scenario.target is None:
        return None
    for step, value in trial.first["evaluations"]:
        if scenario.target.reached_by(value):
            return _seconds_until(trial, step)
    return None


def _seconds_until(trial: Trial, last: int) -> float:
    """Of training, up to this step."""
    meetings = [step for step, _ in trial.first["evaluations"] if step < last]
    stretches = zip([0, *meetings], [*meetings, last], strict=True)
    courses = [trial.steps_of(rank, "seconds") for rank in trial.results]
    return sum(
        max(sum(course.get(step, 0.0) for step in range(start + 1, end + 1)) for course in courses)
        for start, end in stretches
    )


def _drift(trial: Trial) -> float:
    return sqrt(fmean(result["deviation"] ** 2 for result in trial.results.values()))


def _equal(trial: Trial) -> bool:
    return len({result["fingerprint"] for result in trial.results.values()}) == 1


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _over_repeats(trials: Sequence[Trial], key: str) -> list[float]:
    """By step, the mean over repeats of the mean over ranks."""
    courses = [trial.by_step(key) for trial in trials]
    steps = sorted(set.intersection(*(set(course) for course in courses)))
    return [fmean(course[step] for course in courses) for step in steps]


def _events(scenario: Scenario, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """After which step each came, the mean over ranks and repeats; None if it never did."""
    rows = []
    for number, event in enumerate(scenario.events):
        steps = [after[number] for trial in trials for after in trial.happened.values()]
        step = _mean_of_known(steps)
        rows.append({"event": str(event), "step": None if step is None else round(step)})
    return rows

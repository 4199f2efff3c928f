"""What the runs of a plan say: from every worker's steps to one row.

    seconds_per_step   mean over ranks, steps and repeats; without the first steps and those that
                       follow an event
    seconds_to_target  training until the target was met; mean over the repeats that met it
    seconds_all        all steps of a run; mean over repeats
    backward_seconds, exposed_seconds, codec_seconds
                       of the same steps: from the first gradient to the last, from there to the
                       last average, and CPU time of compressing; where the plan has common steps
    drift              sqrt(mean over ranks of (|x_i - mean| / |mean|)^2) of the parameters x

Evaluations take no part in any of them. At each all ranks wait for one another, so training took
as long as, stretch by stretch, its slowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, quantiles
from typing import Any

from thalweg.bench.scenario import Scenario
from thalweg.lab.event_runner import AppliedEvent

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One run: every worker's result by rank, nothing for one that was killed, and what happened
    meanwhile."""

    results: Sequence[Result | None]
    fired: Sequence[AppliedEvent] = ()

    @property
    def reported(self) -> list[Result]:
        """The results there are."""
        return [result for result in self.results if result]

    def by_step(self, key: str) -> dict[int, float]:
        """Seconds or losses by step: the mean over the ranks that took it."""
        courses = [_steps(result, key) for result in self.reported]
        steps = sorted(set().union(*courses))
        return {step: fmean(c[step] for c in courses if step in c) for step in steps}


def row_of(sync: str, scenario: Scenario, trials: Sequence[TrainingRun]) -> dict[str, Any]:
    """Figures of all repeats together, those of each, and the course for a picture."""
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
        **_parts_of_a_step(scenario, trials),
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


def _parts_of_a_step(scenario: Scenario, trials: Sequence[TrainingRun]) -> dict[str, float | None]:
    timings = [
        timing
        for trial in trials
        for counted in [set(scenario.counted(fired.step for fired in trial.fired))]
        for result in trial.reported
        for timing in result.get("timings", ())
        if timing["step"] + 1 in counted
    ]
    return {
        f"{part}_seconds": fmean(timing[part] for timing in timings) if timings else None
        for part in ("backward", "exposed", "codec")
    }


def _pace(scenario: Scenario, trials: Sequence[TrainingRun]) -> list[dict[str, Any]]:
    """What a step takes each host before the first event and after the last."""
    paces: dict[int, tuple[list[float], list[float]]] = {}
    for trial in trials:
        happened = [fired.step for fired in trial.fired if fired.step is not None]
        if not happened:
            continue
        counted = scenario.counted(happened)
        for rank, result in enumerate(trial.results):
            seconds = _steps(result, "seconds") if result else {}
            before, after = paces.setdefault(rank, ([], []))
            before += [seconds[s] for s in counted if s in seconds and s <= min(happened)]
            after += [seconds[s] for s in counted if s in seconds and s > max(happened)]
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
    figures = (
        "seconds_per_step",
        "predicted_seconds_per_step",
        "seconds_to_target",
        "seconds_all",
        "metric",
        "drift",
    )
    return {"sync": sync, **dict.fromkeys(figures), "error": error}


def _steps(result: Result, key: str) -> dict[int, float]:
    """One worker's seconds or losses by step, from 1."""
    return dict(zip(result["steps"], result[key], strict=True))


def _counted(scenario: Scenario, trial: TrainingRun) -> list[float]:
    """Seconds of every step of every rank that counts."""
    steps = set(scenario.counted(fired.step for fired in trial.fired))
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
    """Of training, up to this step."""
    meetings = [step for step, _ in trial.reported[0]["evaluations"] if step < last]
    stretches = zip([0, *meetings], [*meetings, last], strict=True)
    courses = [_steps(result, "seconds") for result in trial.reported]
    return sum(
        max(sum(course.get(step, 0.0) for step in range(start + 1, end + 1)) for course in courses)
        for start, end in stretches
    )


def _drift(trial: TrainingRun) -> float:
    return sqrt(fmean(result["deviation"] ** 2 for result in trial.reported))


def _equal(trial: TrainingRun) -> bool:
    return len({result["fingerprint"] for result in trial.reported}) == 1


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _over_repeats(trials: Sequence[TrainingRun], key: str) -> list[float]:
    """By step, the mean over repeats of the mean over ranks."""
    courses = [trial.by_step(key) for trial in trials]
    steps = sorted(set.intersection(*(set(course) for course in courses)))
    return [fmean(course[step] for course in courses) for step in steps]


def _events(scenario: Scenario, trials: Sequence[TrainingRun]) -> list[dict[str, Any]]:
    """After which step of the slowest rank each came, in every repeat that it came in."""
    return [
        {
            "event": str(event),
            "steps": [f.step for trial in trials for f in trial.fired if f.event == event],
        }
        for event in scenario.events
    ]

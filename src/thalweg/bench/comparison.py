"""A comparison of a scenario's plans by runs of the same job with the same events.

Every run has fresh workers. In a repeat all plans take turns, with the same initial model and the
same order of samples; the next repeat has others, so that noise and chance affect all plans alike.
A plan that fails in the scenario is left out of the remaining turns, and its row has the error; the
others continue.

The row of a plan has its metrics over the steps of every worker in every run, its trials:

    seconds_per_step   mean over ranks, counted steps and repeats; `quartiles` of the same values
    seconds_to_target  training time until the target was reached; mean over the repeats that did
    seconds_all        time of all steps of a run; mean over repeats
    metric             the job's metric on held-out samples at the end; mean over repeats
    backward_seconds, exposed_seconds, codec_seconds
                       of the counted steps: from the first gradient to the last, from there to the
                       last average, and CPU time of compressing; where the plan has common steps
    drift              sqrt(mean over ranks of (|x_i - mean| / |mean|)^2) of the parameters x
    repeats            the metrics of each repeat
    losses, seconds    at each step: mean over ranks and repeats
    events             for each event, the step of the slowest rank after which it was applied in
                       each repeat; None if that is unknown
    adjustments, choices, late
                       in each repeat: changes of averaging groups, plans of `auto`, stragglers
    pace               mean step time of each host before the first event and after the last
    predicted_*        the prediction for seconds_per_step, with its 80 % interval

Warm-up steps and the steps after an event aren't counted, and evaluations take no part. All ranks
wait for one another at each evaluation, so the training time between two evaluations is that of the
slowest rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import sqrt
from statistics import fmean, quantiles
from typing import Any

from thalweg import lab as labs
from thalweg.bench.prediction_check import Row, auto_plans, predict_scenario
from thalweg.bench.run_everywhere import NotedProgress
from thalweg.bench.scenario import Scenario
from thalweg.bench.simulated_compute import SimulatedCompute
from thalweg.bench.training import Recipe, by_step, train
from thalweg.catalog import default_catalog, parse_plan
from thalweg.declarations import Promise
from thalweg.errors import LabError, RunError, ThalwegError
from thalweg.facts import Situation
from thalweg.lab.event import AppliedEvent
from thalweg.launch.place import HERE
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.launch.worker_group import OnMessage
from thalweg.plan import TRANSPORT
from thalweg.redundancy import spare_ranks
from thalweg.schedules import Group
from thalweg.training.auto.request import plan_at_first

Result = Mapping[str, Any]
MEANS_OF_REPEATS = ("seconds_to_target", "seconds_all", "metric", "drift")
COMPARISON_TIMEOUT = "5min"  # how long a worker waits for another


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One run: the workers' results by rank, empty for a killed worker, and the applied events."""

    results: Sequence[Result | None]
    fired: Sequence[AppliedEvent] = ()

    @property
    def reported(self) -> list[Result]:
        """The results of the workers that finished."""
        return [result for result in self.results if result]

    @property
    def event_steps(self) -> list[int]:
        """The known steps after which events were applied."""
        return [applied.step for applied in self.fired if applied.step is not None]

    def counted(self, scenario: Scenario) -> set[int]:
        """The steps that count for the step time."""
        return set(scenario.counted(self.event_steps))


def compare(
    scenario: Scenario,
    lab: labs.Lab | None,
    progress: NotedProgress,
    situation: Situation | None = None,
) -> list[Row]:
    """A row for each plan, in the scenario's order, with its prediction if the situation is
    known. Without a lab workers run on this machine: links have no rates, and no events happen."""
    trials: dict[str, list[TrainingRun]] = {sync: [] for sync in scenario.syncs}
    errors: dict[str, str] = {}
    turns = list(product(range(scenario.repeats), scenario.syncs))
    total = len(turns) * scenario.steps
    for number, (repeat, sync) in enumerate(turns):
        if sync in errors:
            continue
        report = partial(_report, progress, number * scenario.steps, total, sync)
        try:
            trials[sync].append(_trial(scenario, sync, repeat, lab, report))
        except LabError:
            raise
        except ThalwegError as error:
            errors[sync] = str(error)
    return [
        _row(scenario, sync, trials[sync], errors.get(sync), situation) for sync in scenario.syncs
    ]


def _report(
    progress: NotedProgress,
    before: int,
    total: int,
    sync: str,
    rank: int,
    message: Mapping[str, Any],
) -> None:
    if rank == 0:
        progress(before + message["step"], total, sync)


def _trial(
    scenario: Scenario, sync: str, repeat: int, lab: labs.Lab | None, on_message: OnMessage
) -> TrainingRun:
    """One run, in a lab from the declared rates of its links."""
    recipe = Recipe(
        steps=scenario.steps,
        seed=repeat,
        batch=scenario.batch,
        timeout=COMPARISON_TIMEOUT,
        evaluate_every=scenario.evaluate_every if scenario.target else None,
        injection=SimulatedCompute(compute=scenario.compute, cluster=scenario.cluster, seed=repeat),
    )

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        return train(scenario.job, sync, recipe, report)[1]  # the result, without the model

    if lab is not None:
        lab.restore()
    director = None if lab is None else lab.director(scenario.events)
    results = run_workers(
        scenario.cluster.workers,
        work,
        timeout=None,
        place=HERE if lab is None else lab.place,
        director=director,
        on_message=on_message,
        spare=spare_ranks(parse_plan(sync), Group.everybody(scenario.cluster)),
    )
    trial = TrainingRun(results=results, fired=() if director is None else tuple(director.fired))
    if not trial.reported:
        raise RunError("no worker finished", "let the events leave one alive")
    return trial


def _row(
    scenario: Scenario,
    sync: str,
    trials: Sequence[TrainingRun],
    error: str | None,
    situation: Situation | None,
) -> Row:
    row = row_of_failure(sync, error) if error else row_of(sync, scenario, trials)
    plan, catalog = parse_plan(sync), default_catalog()
    promise = catalog.guarantee(plan).promise
    if not error and promise is Promise.EXACT and not row["replicas_equal"]:
        row["error"] = "replicas differ under an exact plan; please report this"
    automatic = sync in auto_plans(scenario)  # each choice of `auto` has its own prediction
    known = None if automatic else situation
    estimate = None if known is None else predict_scenario(scenario, sync, known)
    return {
        **row,
        "promise": promise.value,
        "transport": "gloo" if catalog.is_native(plan_at_first(plan)) else TRANSPORT,
        "predicted_seconds_per_step": estimate and estimate.seconds,
        "predicted_low": estimate and estimate.low,
        "predicted_high": estimate and estimate.high,
    }


def row_of(sync: str, scenario: Scenario, trials: Sequence[TrainingRun]) -> Row:
    """The metrics of all repeats together and of each, and the series for a plot."""
    repeats = [_repeat(scenario, trial) for trial in trials]
    pooled = [seconds for trial in trials for seconds in _counted(scenario, trial)]
    first = [trial.reported[0] for trial in trials]
    return {
        "sync": sync,
        "seconds_per_step": _mean(pooled),
        **{key: _mean(repeat[key] for repeat in repeats) for key in MEANS_OF_REPEATS},
        **_step_parts(scenario, trials),
        "error": None,
        "replicas_equal": all(
            len({result["fingerprint"] for result in trial.reported}) == 1 for trial in trials
        ),
        "quartiles": quantiles(pooled, n=4) if len(pooled) > 1 else None,
        "repeats": repeats,
        "losses": _over_repeats(trials, "losses"),
        "seconds": _over_repeats(trials, "seconds"),
        "events": [
            {
                "event": str(event),
                "steps": [f.step for trial in trials for f in trial.fired if f.event == event],
            }
            for event in scenario.events
        ],
        "adjustments": [result["adjustments"] for result in first],
        "choices": [result.get("choices", []) for result in first],
        "late": [result.get("late", []) for result in first],
        "pace": _pace(scenario, trials),
    }


def _repeat(scenario: Scenario, trial: TrainingRun) -> Row:
    """The metrics of one run."""
    return {
        "seconds_per_step": _mean(_counted(scenario, trial)),
        "seconds_to_target": _seconds_to_target(scenario, trial),
        "seconds_all": _seconds_until(trial, scenario.steps),
        "metric": trial.reported[0]["metric"],
        "drift": sqrt(fmean(result["deviation"] ** 2 for result in trial.reported)),
        "evaluations": trial.reported[0]["evaluations"],
    }


def _step_parts(scenario: Scenario, trials: Sequence[TrainingRun]) -> dict[str, float | None]:
    """The mean of each part of the counted steps, in seconds."""
    counted = [trial.counted(scenario) for trial in trials]
    timings = [
        timing
        for trial, steps in zip(trials, counted, strict=True)
        for result in trial.reported
        for timing in result.get("timings", ())
        if timing["step"] + 1 in steps
    ]
    parts = ("backward", "exposed", "codec")
    return {f"{part}_seconds": _mean(timing[part] for timing in timings) for part in parts}


def _pace(scenario: Scenario, trials: Sequence[TrainingRun]) -> list[Row]:
    """The step time of each host before the first event and after the last."""
    paces: dict[int, tuple[list[float], list[float]]] = {}
    for trial in trials:
        events, counted = trial.event_steps, trial.counted(scenario)
        for rank, result in enumerate(trial.results if events else ()):
            seconds = _steps(result, "seconds") if result else {}
            before, after = paces.setdefault(rank, ([], []))
            before += [seconds[s] for s in counted if s in seconds and s <= min(events)]
            after += [seconds[s] for s in counted if s in seconds and s > max(events)]
    return [
        {
            "rank": rank,
            "host": scenario.cluster.host(rank).name,
            "before": _mean(before),
            "after": _mean(after),
        }
        for rank, (before, after) in sorted(paces.items())
    ]


def row_of_failure(sync: str, error: str) -> dict[str, Any]:
    return {
        "sync": sync,
        **dict.fromkeys(("seconds_per_step", *MEANS_OF_REPEATS)),
        "error": error,
    }


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
    target, evaluations = scenario.target, trial.reported[0]["evaluations"]
    reached = (step for step, value in evaluations if target and target.reached_by(value))
    return next((_seconds_until(trial, step) for step in reached), None)


def _seconds_until(trial: TrainingRun, last: int) -> float:
    """The training time up to this step: that of the slowest rank between two evaluations."""
    evaluated = [step for step, _ in trial.reported[0]["evaluations"] if step < last]
    intervals = zip([0, *evaluated], [*evaluated, last], strict=True)
    series = [_steps(result, "seconds") for result in trial.reported]
    return sum(
        max(sum(seconds.get(s, 0.0) for s in range(start + 1, end + 1)) for seconds in series)
        for start, end in intervals
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _over_repeats(trials: Sequence[TrainingRun], key: str) -> list[float]:
    """The mean over repeats of the mean over ranks, by step."""
    series = [by_step(trial.results, key) for trial in trials]
    steps = sorted(set.intersection(*map(set, series)))
    return [fmean(values[step] for values in series) for step in steps]

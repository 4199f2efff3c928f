"""A comparison of a scenario's plans: the same job, the same start, the same events.

Every run has fresh workers. The plans take turns and the whole is repeated, each time from another
start with samples in another order, so that noise and chance affect all plans alike. A plan that
fails in the scenario is left out of the remaining turns, and its row has the error; the others
continue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from thalweg.bench.metrics import TrainingRun, row_of, row_of_failure
from thalweg.bench.prediction_check import ScenarioPrediction, auto_plans
from thalweg.bench.scenario import Scenario
from thalweg.bench.simulated_compute import SimulatedCompute
from thalweg.bench.training import Recipe, train
from thalweg.catalog import default_catalog, parse_plan
from thalweg.declarations import Promise
from thalweg.errors import LabError, RunError, ThalwegError
from thalweg.lab import Event
from thalweg.launch.supervisor import SendMessage, Work, run_workers
from thalweg.launch.worker_group import OnMessage
from thalweg.plan import TRANSPORT
from thalweg.redundancy import spare_ranks
from thalweg.schedules import Group
from thalweg.training.auto.request import plan_at_first

if TYPE_CHECKING:
    from thalweg.lab import Lab

Row = dict[str, Any]
RunAll = Callable[[Work, OnMessage, Collection[int]], TrainingRun]
"""Runs fresh workers in the scenario's cluster; `spare` ranks may fail."""
Progress = Callable[[int, int, str], None]
"""Called with the number of steps done, their total number, and the current plan."""
COMPARISON_TIMEOUT = "5min"  # how long a worker waits for another


def side_by_side(workers: int) -> RunAll:
    """A runner on this machine, where links have no rates and no events happen."""

    def run_all(work: Work, on_message: OnMessage, spare: Collection[int]) -> TrainingRun:
        return TrainingRun(
            results=run_workers(workers, work, timeout=None, on_message=on_message, spare=spare)
        )

    return run_all


def in_lab(lab: Lab, events: Sequence[Event]) -> RunAll:
    """A runner in the lab, whose links are restored to their declared rates before each run."""

    def run_all(work: Work, on_message: OnMessage, spare: Collection[int]) -> TrainingRun:
        lab.restore()
        director = lab.director(events)
        results = run_workers(
            lab.cluster.workers,
            work,
            timeout=None,
            place=lab.place,
            director=director,
            on_message=on_message,
            spare=spare,
        )
        return TrainingRun(results=results, fired=tuple(director.fired))

    return run_all


def compare(
    scenario: Scenario,
    run_all: RunAll,
    progress: Progress,
    forecast: ScenarioPrediction | None = None,
) -> list[Row]:
    """A row for each plan, in the scenario's order, with its prediction if there is a forecast."""
    trials: dict[str, list[TrainingRun]] = {sync: [] for sync in scenario.syncs}
    errors: dict[str, str] = {}
    total = scenario.repeats * len(scenario.syncs) * scenario.steps
    done = 0
    for repeat in range(scenario.repeats):
        for sync in scenario.syncs:
            if sync not in errors:
                report = partial(_report, progress, done, total, sync)
                try:
                    trials[sync].append(_trial(scenario, sync, repeat, run_all, report))
                except LabError:
                    raise
                except ThalwegError as error:
                    errors[sync] = str(error)
            done += scenario.steps
    rows = [_row(scenario, sync, trials[sync], errors.get(sync)) for sync in scenario.syncs]
    return rows if forecast is None else [_predicted(row, scenario, forecast) for row in rows]


def _report(
    progress: Progress, before: int, total: int, sync: str, rank: int, message: Mapping[str, Any]
) -> None:
    if rank == 0:
        progress(before + message["step"], total, sync)


def _trial(
    scenario: Scenario, sync: str, repeat: int, run_all: RunAll, on_message: OnMessage
) -> TrainingRun:
    recipe = Recipe(
        steps=scenario.steps,
        seed=repeat,
        batch=scenario.batch,
        timeout=COMPARISON_TIMEOUT,
        evaluate_every=scenario.evaluate_every if scenario.target else None,
        injection=SimulatedCompute(compute=scenario.compute, cluster=scenario.cluster, seed=repeat),
    )

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        return train(scenario.job, sync, recipe, report)[1]

    spare = spare_ranks(parse_plan(sync), Group.everybody(scenario.cluster))
    trial = run_all(work, on_message, spare)
    if not trial.reported:
        raise RunError("no worker finished", "let the events leave one alive")
    return trial


def _row(scenario: Scenario, sync: str, trials: Sequence[TrainingRun], error: str | None) -> Row:
    row = row_of_failure(sync, error) if error else row_of(sync, scenario, trials)
    plan, catalog = parse_plan(sync), default_catalog()
    promise = catalog.guarantee(plan).promise
    if not error and promise is Promise.EXACT and not row["replicas_equal"]:
        row["error"] = "replicas differ under an exact plan; please report this"
    transport = "gloo" if catalog.is_native(plan_at_first(plan)) else TRANSPORT
    return {**row, "promise": promise.value, "transport": transport}


def _predicted(row: Row, scenario: Scenario, forecast: ScenarioPrediction) -> Row:
    """The row with its prediction; `auto` has none, since its choices have their own."""
    automatic = row["sync"] in auto_plans(scenario)
    estimate = None if automatic else forecast.of(scenario, row["sync"])
    return {
        **row,
        "predicted_seconds_per_step": estimate and estimate.seconds,
        "predicted_low": estimate and estimate.low,
        "predicted_high": estimate and estimate.high,
    }

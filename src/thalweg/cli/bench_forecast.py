"""`thalweg bench forecast SCENARIO.toml ...`: predicted and measured step times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thalweg.cli.bench_train import RepeatsOption, StepsOption, in_a_lab, shortened
from thalweg.cli.output import JsonOption, console, progress_bar, write_json
from thalweg.facts import about
from thalweg.report.tables import table_of

if TYPE_CHECKING:
    from thalweg.bench.prediction_check import AutoVsBest, PredictionOutcome

PREDICTION_COLUMNS: Mapping[str, Callable[[PredictionOutcome], str]] = {
    "scenario": attrgetter("scenario"),
    "plan": attrgetter("sync"),
    ">predicted": lambda one: about(one.predicted, "s"),
    ">interval": lambda one: f"{about(one.low, 's')} to {about(one.high, 's')}",
    ">measured": lambda one: about(one.measured, "s"),
    ">error": lambda one: f"{one.error:+.1%}" + ("" if one.covered else " !"),
}
CHOICE_COLUMNS: Mapping[str, Callable[[AutoVsBest], str]] = {
    "scenario": attrgetter("scenario"),
    "requested": attrgetter("sync"),
    "chosen": attrgetter("chosen"),
    ">step time": lambda one: about(one.seconds, "s"),
    "best fixed plan": attrgetter("best"),
    ">its step time": lambda one: about(one.best_seconds, "s"),
    ">slower by": lambda one: f"{one.behind:+.1%}",
}


def command(
    paths: Annotated[
        list[Path], typer.Argument(metavar="SCENARIO.toml...", help="See scenarios/.")
    ],
    sync: Annotated[
        list[str] | None, typer.Option(metavar="PLAN", help="Besides the files'; may be repeated.")
    ] = None,
    repeats: RepeatsOption = None,
    steps: StepsOption = None,
    json_path: JsonOption = None,
) -> None:
    """Predict every plan of these scenarios, then train under it, in a lab for each scenario.

    The predictions are made from a calibration in the same lab. Where `auto` is among the plans,
    its choice is compared with the best fixed plan.
    """
    from thalweg.bench.prediction_check import Accuracy, auto_choices, prediction_outcomes
    from thalweg.bench.scenario import read_scenario  # torch takes a second: not at import

    predictions: list[PredictionOutcome] = []
    chosen: list[AutoVsBest] = []
    scenarios = [read_scenario(path) for path in paths]
    for scenario in scenarios:
        syncs = tuple(dict.fromkeys((*scenario.syncs, *(sync or ()))))
        scenario = replace(shortened(scenario, repeats, steps), syncs=syncs, target=None)
        with progress_bar(f"Predicting and comparing in {scenario.name}") as bar:
            rows, _ = in_a_lab(scenario, bar, predicted=True)
        predictions += prediction_outcomes(scenario, rows)
        chosen += auto_choices(scenario, rows)
    terminal = console(json_path)
    terminal.print(table_of(predictions, PREDICTION_COLUMNS))
    accuracy = Accuracy.of(predictions) if predictions else None
    if accuracy is not None:
        terminal.print(
            f"{accuracy.predictions} predictions: the median error is {accuracy.median:.1%}; "
            f"{accuracy.within:.0%} are within 15 %, {accuracy.covered:.0%} in their interval"
        )
    if chosen:
        terminal.print(table_of(chosen, CHOICE_COLUMNS))
    settings = {
        "scenarios": [scenario.name for scenario in scenarios],
        "accuracy": None if accuracy is None else asdict(accuracy),
        "choices": [{**asdict(one), "behind": one.behind} for one in chosen],
    }
    rows = [{**asdict(one), "error": one.error, "covered": one.covered} for one in predictions]
    write_json(json_path, "bench forecast", settings, rows)

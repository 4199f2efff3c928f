"""`thalweg bench forecast SCENARIO.toml ...`: what was predicted, beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from thalweg.cli.bench_train import in_a_lab
from thalweg.cli.output import JsonOption, console, progress_bar, write_json
from thalweg.facts import about
from thalweg.report.tables import table_of

if TYPE_CHECKING:
    from thalweg.bench.prediction_check import AutoVsBest, PredictionOutcome


def command(
    paths: Annotated[
        list[Path], typer.Argument(metavar="SCENARIO.toml...", help="See scenarios/.")
    ],
    sync: Annotated[
        list[str] | None,
        typer.Option("--sync", metavar="PLAN", help="Besides the files'; may be repeated."),
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Instead of the files'.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Instead of the files'; later events don't come.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Predict every plan of these scenarios, then train under it, in a lab for each scenario.

    All that is known beforehand is a calibration in the same lab. Where `auto` is among the plans,
    what it came to is put beside the best of the others.
    """
    from thalweg.bench.prediction_check import Accuracy, auto_choices, prediction_outcomes
    from thalweg.bench.scenario import read_scenario  # torch takes a second: not at import

    predictions: list[PredictionOutcome] = []
    chosen: list[AutoVsBest] = []
    scenarios = [read_scenario(path) for path in paths]
    for scenario in scenarios:
        number = steps or scenario.steps
        scenario = replace(
            scenario,
            syncs=tuple(dict.fromkeys((*scenario.syncs, *(sync or ())))),
            repeats=repeats or scenario.repeats,
            steps=number,
            events=tuple(e for e in scenario.events if e.at_step is None or e.at_step < number),
            target=None,
        )
        with progress_bar(f"Predicting and comparing in {scenario.name}") as bar:
            rows, _ = in_a_lab(scenario, bar, predicted=True)
        predictions += prediction_outcomes(scenario, rows)
        chosen += auto_choices(scenario, rows)
    terminal = console(json_path)
    terminal.print(_table(predictions))
    accuracy = Accuracy.of(predictions) if predictions else None
    if accuracy is not None:
        terminal.print(
            f"{accuracy.predictions} predictions: the median error is {accuracy.median:.1%}; "
            f"{accuracy.within:.0%} are within 15 %, {accuracy.covered:.0%} in their interval"
        )
    if chosen:
        terminal.print(_chosen(chosen))
    settings = {
        "scenarios": [scenario.name for scenario in scenarios],
        "accuracy": None if accuracy is None else asdict(accuracy),
        "choices": [{**asdict(one), "behind": one.behind} for one in chosen],
    }
    write_json(json_path, "bench forecast", settings, [_row(one) for one in predictions])


def _row(one: PredictionOutcome) -> dict[str, Any]:
    return {**asdict(one), "error": one.error, "covered": one.covered}


def _table(predictions: Sequence[PredictionOutcome]) -> Table:
    table = table_of("scenario", "plan", ">predicted", ">interval", ">measured", ">error")
    for one in predictions:
        table.add_row(
            one.scenario,
            one.sync,
            about(one.predicted, "s"),
            f"{about(one.low, 's')} to {about(one.high, 's')}",
            about(one.measured, "s"),
            f"{one.error:+.1%}" + ("" if one.covered else " !"),
        )
    return table


def _chosen(choices: Sequence[AutoVsBest]) -> Table:
    plans = ("scenario", "asked for", "chosen")
    table = table_of(*plans, ">a step", "best of the others", ">a step", ">behind")
    for one in choices:
        table.add_row(
            one.scenario,
            one.sync,
            one.chosen,
            about(one.seconds, "s"),
            one.best,
            about(one.best_seconds, "s"),
            f"{one.behind:+.1%}",
        )
    return table

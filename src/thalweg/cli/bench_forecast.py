"""`thalweg bench forecast SCENARIO.toml ...`: predicted and measured step times."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from thalweg.cli.bench_train import RepeatsOption, StepsOption, in_a_lab, shortened
from thalweg.cli.output import JsonOption, console, progress_bar, write_json
from thalweg.facts import about
from thalweg.report.tables import Columns, table_of

PREDICTION_COLUMNS: Columns = {
    "scenario": itemgetter("scenario"),
    "plan": itemgetter("sync"),
    ">predicted": lambda row: about(row["predicted"], "s"),
    ">interval": lambda row: f"{about(row['low'], 's')} to {about(row['high'], 's')}",
    ">measured": lambda row: about(row["measured"], "s"),
    ">error": lambda row: f"{row['error']:+.1%}" + ("" if row["covered"] else " !"),
}
CHOICE_COLUMNS: Columns = {
    "scenario": itemgetter("scenario"),
    "requested": itemgetter("sync"),
    "chosen": itemgetter("chosen"),
    ">step time": lambda row: about(row["seconds"], "s"),
    "best fixed plan": itemgetter("best"),
    ">its step time": lambda row: about(row["best_seconds"], "s"),
    ">slower by": lambda row: f"{row['behind']:+.1%}",
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
    from thalweg.bench.prediction_check import accuracy_of, auto_choices, prediction_rows
    from thalweg.bench.scenario import read_scenario  # torch takes a second: not at import

    predictions: list[dict[str, Any]] = []
    choices: list[dict[str, Any]] = []
    scenarios = [read_scenario(path) for path in paths]
    for scenario in scenarios:
        syncs = tuple(dict.fromkeys((*scenario.syncs, *(sync or ()))))
        scenario = replace(shortened(scenario, repeats, steps), syncs=syncs, target=None)
        with progress_bar(f"Predicting and comparing in {scenario.name}") as bar:
            rows, _ = in_a_lab(scenario, bar, predicted=True)
        predictions += prediction_rows(scenario, rows)
        choices += auto_choices(scenario, rows)
    terminal = console(json_path)
    terminal.print(table_of(predictions, PREDICTION_COLUMNS))
    accuracy = accuracy_of(predictions) if predictions else None
    if accuracy is not None:
        terminal.print(
            f"{accuracy['predictions']} predictions: the median error is "
            f"{accuracy['median']:.1%}; {accuracy['within']:.0%} are within 15 %, "
            f"{accuracy['covered']:.0%} in their interval"
        )
    if choices:
        terminal.print(table_of(choices, CHOICE_COLUMNS))
    settings = {
        "scenarios": [scenario.name for scenario in scenarios],
        "accuracy": accuracy,
        "choices": choices,
    }
    write_json(json_path, "bench forecast", settings, predictions)

"""`thalweg bench train SCENARIO.toml`: plans compared in a lab, with its events; and `thalweg bench
forecast SCENARIO.toml ...`: their predicted and measured step times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thalweg.bench.run_everywhere import Report
from thalweg.cli.options import Output, choice_line, lab_of, option, progress_bar, with_bundles
from thalweg.declarations import listed
from thalweg.errors import RunError
from thalweg.facts import about, format_cluster
from thalweg.report.plots import TrainingCurve, draw_trainings
from thalweg.report.tables import Columns, seconds_text, table_of

if TYPE_CHECKING:
    from thalweg.bench.scenario import Scenario

Rows = list[dict[str, Any]]
CODEC_STEP_PARTS = ("backward", "exposed", "codec")  # parts of a step with a compressor
WITHOUT_LAB_NOTE = (
    "--workers-only: workers on this machine; links had no rates, and no events happened"
)
RepeatsOption = Annotated[int | None, option("Instead of the files' repeats.", min=1)]
StepsOption = Annotated[
    int | None, option("Instead of the files' steps; later events are omitted.", min=1)
]

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


@with_bundles
def train(
    *,
    path: Annotated[Path, typer.Argument(metavar="SCENARIO.toml", help="See scenarios/.")],
    workers_only: Annotated[
        bool, option("Local workers without a lab: no shaping, no events.", None, "--workers-only")
    ] = False,
    sync: Annotated[
        list[str] | None, option("Instead of the file's; may be repeated.", "PLAN")
    ] = None,
    repeats: RepeatsOption = None,
    steps: StepsOption = None,
    predicted: Annotated[
        bool, option("Calibrate first, and predict every plan.", None, "--predict/--no-predict")
    ] = True,
    out: Annotated[Path, option("Where the picture goes.", "DIR")] = Path("thalweg-bench"),
    output: Output,
) -> None:
    """Train a scenario's job under each of its plans, in a lab as the scenario describes it.

    The plans take turns, from the same start on the same samples, with the same stragglers.
    """
    scenario = _scenario(path, repeats, steps)
    scenario = replace(scenario, syncs=tuple(sync or scenario.syncs))
    with progress_bar(f"Comparing in {scenario.name}") as show:
        rows, notes = _compared(scenario, show, in_lab=not workers_only, predicted=predicted)
    title = (
        f"{scenario.name}: {scenario.job.name} on {scenario.cluster.workers} workers, "
        f"{scenario.steps} steps, repeats: {scenario.repeats}"
    )
    output.print(title, style="italic")
    output.print(table_of(rows, _columns(scenario, rows)))
    for row in rows:
        if row["error"]:
            output.print(f"{row['sync']}: {row['error']}")
        for made in row.get("adjustments", [[]])[0]:
            text = f"{made['kept_apart']} ({made['reason']})"
            output.print(f"{row['sync']}, from step {made['step']}: {text}")
        for chosen in row.get("choices", [[]])[0]:
            output.print(f"{row['sync']}, {choice_line(chosen)}")
    output.print(*notes)
    output.write("Picture", out / f"{scenario.name}.svg", _picture(scenario, rows))
    output.write_json("bench train", rows, **_settings(scenario, notes))
    failed = [row["sync"] for row in rows if row["error"]]
    if failed:
        raise RunError(f"{listed(failed)} failed", "see the errors above, or leave the plan out")


@with_bundles
def forecast(
    *,
    paths: Annotated[
        list[Path], typer.Argument(metavar="SCENARIO.toml...", help="See scenarios/.")
    ],
    sync: Annotated[
        list[str] | None, option("Besides the files'; may be repeated.", "PLAN")
    ] = None,
    repeats: RepeatsOption = None,
    steps: StepsOption = None,
    output: Output,
) -> None:
    """Predict every plan of these scenarios, then train under it, in a lab for each scenario.

    The predictions are made from a calibration in the same lab. Where `auto` is among the plans,
    its choice is compared with the best fixed plan.
    """
    # torch takes a second: not at import
    from thalweg.bench.prediction_check import accuracy_of, auto_choices, prediction_rows

    predictions: list[dict[str, Any]] = []
    choices: list[dict[str, Any]] = []
    scenarios = [_scenario(path, repeats, steps) for path in paths]
    for scenario in scenarios:
        syncs = tuple(dict.fromkeys((*scenario.syncs, *(sync or ()))))
        scenario = replace(scenario, syncs=syncs, target=None)
        with progress_bar(f"Predicting and comparing in {scenario.name}") as show:
            rows, _ = _compared(scenario, show)
        predictions += prediction_rows(scenario, rows)
        choices += auto_choices(scenario, rows)
    output.print(table_of(predictions, PREDICTION_COLUMNS))
    accuracy = accuracy_of(predictions) if predictions else None
    if accuracy is not None:
        output.print(
            f"{accuracy['predictions']} predictions: the median error is "
            f"{accuracy['median']:.1%}; {accuracy['within']:.0%} are within 15 %, "
            f"{accuracy['covered']:.0%} in their interval"
        )
    if choices:
        output.print(table_of(choices, CHOICE_COLUMNS))
    output.write_json(
        "bench forecast",
        predictions,
        scenarios=[scenario.name for scenario in scenarios],
        accuracy=accuracy,
        choices=choices,
    )


def _scenario(path: Path, repeats: int | None, steps: int | None) -> Scenario:
    """The scenario with these numbers instead of its own, and without events after its end."""
    from thalweg.bench.scenario import read_scenario  # torch takes a second: not at import

    scenario = read_scenario(path)
    steps = steps or scenario.steps
    events = tuple(e for e in scenario.events if e.at_step is None or e.at_step < steps)
    return replace(scenario, repeats=repeats or scenario.repeats, steps=steps, events=events)


def _compared(
    scenario: Scenario, show: Report, *, in_lab: bool = True, predicted: bool = True
) -> tuple[Rows, list[str]]:
    """The rows of a comparison, and notes on the place; only in a lab can they be predicted."""
    from thalweg.bench.comparison import compare
    from thalweg.bench.prediction_check import calibrate_scenario

    if not in_lab:
        return compare(scenario, None, show), [WITHOUT_LAB_NOTE]
    with lab_of(scenario.cluster, scenario.loss) as lab:
        situation = None
        if predicted:
            show(0, 1, "calibrating")
            situation = calibrate_scenario(scenario, lab, show)
        return compare(scenario, lab, show, situation), lab.notes


def _settings(scenario: Scenario, notes: list[str]) -> dict[str, Any]:
    compute = scenario.compute
    return {
        "scenario": scenario.name,
        "workload": scenario.job.name,
        "metric": scenario.job.metric,
        "workers": scenario.cluster.workers,
        "batch": scenario.batch or scenario.job.batch,
        "steps": scenario.steps,
        "repeats": scenario.repeats,
        "warmup": scenario.warmup,
        "target": str(scenario.target) if scenario.target else None,
        "compute_seconds": compute.step.seconds,
        "late": {"probability": compute.late.probability, "seconds": compute.late.delay.seconds},
        "loss": scenario.loss,
        "events": [str(event) for event in scenario.events],
        "cluster": format_cluster(scenario.cluster),
        "notes": notes,
    }


def _columns(scenario: Scenario, rows: Rows) -> Columns:
    def seconds(key: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: seconds_text(row.get(f"{key}_seconds"))

    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "plan": itemgetter("sync"),
        ">step time": _step_time,
        ">predicted": lambda row: seconds_text(row["predicted_seconds_per_step"]),
        ">interquartile range": _interquartile_range,
    }
    if any(row.get("codec_seconds") for row in rows):
        columns |= {f">{part}": seconds(part) for part in CODEC_STEP_PARTS}
    if scenario.target:
        columns[f">to {scenario.target}"] = _to_target
    return {
        **columns,
        ">total time": lambda row: seconds_text(row["seconds_all"]),
        f">{scenario.job.metric}": lambda row: (
            "" if row["metric"] is None else f"{row['metric']:.4f}"
        ),
        ">drift": lambda row: "" if row["drift"] is None else f"{row['drift']:.2g}",
    }


def _step_time(row: Mapping[str, Any]) -> str:
    if row["seconds_all"] is None:
        return "failed"
    return seconds_text(row["seconds_per_step"]) or "all warm-up"


def _interquartile_range(row: Mapping[str, Any]) -> str:
    quartiles = row.get("quartiles")
    return f"{about(quartiles[0], 's')} to {about(quartiles[2], 's')}" if quartiles else ""


def _to_target(row: Mapping[str, Any]) -> str:
    reached = row["seconds_to_target"]
    return "" if row["seconds_all"] is None else seconds_text(reached) or "never"


def _picture(scenario: Scenario, rows: Rows) -> str:
    curves = [
        TrainingCurve(
            sync=row["sync"],
            losses=row["losses"],
            seconds=row["seconds"],
            quartiles=row["quartiles"] or (0.0, 0.0, 0.0),
            events={e["event"]: e["steps"][0] for e in row["events"] if e["steps"]},
        )
        for row in rows
        if "losses" in row
    ]
    return draw_trainings(f"{scenario.name}: {scenario.job.name}", curves, over_time=True)

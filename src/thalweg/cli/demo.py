"""`thalweg demo`: the main job on this machine, four workers and a small network to train.

In a lab where it can be had: two racks with thin uplinks, and ranks that go round them, as a
scheduler that knows nothing of racks would number them. What a step will take is predicted first,
from a calibration there; then the job is trained under torch's DDP and under `auto`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thalweg.catalog import default_catalog
from thalweg.cli.options import PlaceOptions, with_bundles
from thalweg.cli.output import (
    Bar,
    JsonOption,
    choice_line,
    console,
    progress_bar,
    write_file,
    write_json,
)
from thalweg.declarations import Promise, listed
from thalweg.errors import LabError, RunError, ThalwegError
from thalweg.facts import Cluster, about
from thalweg.predict import Advice, RankedPlan, advise, predict
from thalweg.report.tables import table_of

if TYPE_CHECKING:
    from thalweg.bench.run_everywhere import Deployment
    from thalweg.workloads import Job

DEMO_JOB_NAME = "digits"
DEMO_WORKER_COUNT = 4
DEMO_LAB_LAYOUT, DEMO_NIC_RATE, DEMO_UPLINK_RATE, DEMO_RANK_ORDER = (
    "2x2",
    "1gbit",
    "200mbit",
    "interleaved",
)
DEMO_PLANS = ("ddp", "auto")
MAX_SHOWN_PLANS = 5  # plans of the ranking
PLAN_WARMUP_STEPS = 2  # steps of a new plan that set it up
Rows = list[dict[str, Any]]

CLOSING_TEXT = """
Exact plans end with the same bits on all workers. Try your own cluster: thalweg calibrate,
thalweg advise, thalweg bench train scenarios/oversubscribed-uplink.toml,
thalweg lab up 2x4 --nic 200mbit --uplink 50mbit, thalweg explain hierarchical --lab 2x4"""


@with_bundles
def command(
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where page and picture go.")] = Path(
        "thalweg-demo"
    ),
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 60,
    place: PlaceOptions,
    json_path: JsonOption = None,
) -> None:
    """Predict what a step of a small job takes here, then train it under DDP and under auto.

    Four workers in a lab of two racks with thin uplinks, or on this machine as it is where a lab
    can't be had, train a network on scikit-learn's digits. All start from the same values, on the
    same samples; a table, a page and a picture at the end.
    """
    from thalweg.workloads import find_job  # torch takes a second: not at import

    job = find_job(DEMO_JOB_NAME)
    terminal = console(json_path)
    with _site(place) as deployment:
        title = f"{job.name} on {deployment.text}"
        advice = _advised(deployment, job, terminal)
        if advice is not None:
            terminal.print(advice.verdict, markup=False)
            terminal.print(
                _ranking(f"Best predictions for {title}", advice.ranking[:MAX_SHOWN_PLANS])
            )
        rows = _trained(deployment, job, steps, advice)
    told = [f"Picture: {_draw(out / 'training.svg', title, rows)}"]
    if advice is not None:
        told.append(f"Page: {_write_page(out / 'report.html', advice, rows)}")
    terminal.print(_table(f"{title}, {steps} steps", job.metric, rows))
    for row in rows:
        for chosen in row["choices"]:
            terminal.print(f"{row['sync']}, {choice_line(chosen)}", markup=False)
    notes = ["", *deployment.notes] if deployment.notes else []
    terminal.print("\n".join([*notes, CLOSING_TEXT, *told]))
    settings = {
        "workload": job.name,
        "workers": deployment.workers,
        "steps": steps,
        "lab": deployment.cluster is not None,
        "verdict": None if advice is None else advice.verdict,
        "notes": deployment.notes,
    }
    write_json(json_path, "demo", settings, rows)
    wrong = [
        row["sync"]
        for row in rows
        if row["promise"] == Promise.EXACT.value and not row["identical"]
    ]
    if wrong:
        raise RunError(f"replicas differ under {listed(wrong)}", "please report this")


@contextmanager
def _site(place: PlaceOptions) -> Iterator[Deployment]:
    """As asked for; else the lab, or else this machine and why."""
    from thalweg.bench.run_everywhere import Deployment

    unplaced = place.workers is None and place.lab is None
    chosen = (
        PlaceOptions(
            lab=DEMO_LAB_LAYOUT,
            nic=DEMO_NIC_RATE,
            uplink=DEMO_UPLINK_RATE,
            rank_order=DEMO_RANK_ORDER,
        )
        if unplaced
        else place
    )
    with ExitStack() as stack:
        try:
            deployment = stack.enter_context(chosen.site())
        except LabError as error:
            if place.lab is not None:
                raise
            deployment = Deployment(
                workers=DEMO_WORKER_COUNT, notes=[f"no lab, where links have limits: {error}"]
            )
        else:
            if unplaced:
                deployment = replace(
                    deployment,
                    notes=[
                        f"NICs of {DEMO_NIC_RATE}, uplinks of {DEMO_UPLINK_RATE}",
                        *deployment.notes,
                    ],
                )
        yield deployment


def _declared(deployment: Deployment) -> Cluster:
    """What the workers are told of the network."""
    return deployment.cluster or Cluster.flat(deployment.workers)


def _advised(deployment: Deployment, job: Job, terminal: Console) -> Advice | None:
    """From a calibration there; training goes on without it, after a line that says why."""
    from thalweg.bench.calibrate_job import calibrate_at

    try:
        with progress_bar("Calibrating") as bar:
            found = calibrate_at(
                deployment,
                job,
                _declared(deployment),
                (),
                lambda what, done, total: bar.show(done, total or done + 1, what),
            )
    except ThalwegError as error:
        terminal.print(f"Nothing is predicted, since calibration failed: {error}", markup=False)
        return None
    assert found is not None  # this process is no launched rank
    terminal.print(f"Calibrated in {found.seconds:.0f} s.")
    with progress_bar("Predicting") as bar:
        return advise(
            found.cluster,
            found.workload,
            found.machine,
            declared=_declared(deployment),
            sweep=True,
            progress=bar.show,
        )


def _trained(deployment: Deployment, job: Job, steps: int, advice: Advice | None) -> Rows:
    """A row for each plan, with what was predicted of the plan that it ended with."""
    from thalweg.bench.train_job import step_rows, summary, train_everywhere
    from thalweg.bench.training import Recipe
    from thalweg.training.auto.request import plan_at_first

    catalog = default_catalog()
    rows = []
    with progress_bar("Training") as bar:
        for number, sync in enumerate(DEMO_PLANS):
            show = partial(_show, bar, sync, number * steps, steps * len(DEMO_PLANS))
            results = train_everywhere(deployment, job, sync, Recipe(steps=steps), show)
            per_step = step_rows(results)
            row = {
                "sync": sync,
                "promise": catalog.guarantee(catalog.plan(sync)).promise.value,
                **summary(results, per_step),
                "chosen": str(plan_at_first(catalog.plan(sync))),  # if there were too few steps
                "predicted": None,
                "low": None,
                "high": None,
                "losses": [one["loss"] for one in per_step],
                "seconds": [one["seconds"] for one in per_step],
            }
            if row["choices"]:
                row |= _since_chosen(row["choices"][-1], per_step)
            if advice is not None:
                row |= _predicted(row["chosen"], deployment, advice)
            rows.append(row)
    return rows


def _since_chosen(chosen: Mapping[str, Any], per_step: Rows) -> dict[str, Any]:
    """What the plan that `auto` ended with takes, but for the steps that set it up."""
    first = chosen["step"] + PLAN_WARMUP_STEPS
    seconds = [row["seconds"] for row in per_step if row["step"] > first]
    measured = {"seconds_per_step": fmean(seconds)} if seconds else {}
    return {"chosen": chosen["sync"], **measured}


def _predicted(sync: str, deployment: Deployment, advice: Advice) -> dict[str, Any]:
    estimate = predict(
        sync, advice.cluster, advice.workload, advice.machine, declared=_declared(deployment)
    )
    return {"predicted": estimate.seconds, "low": estimate.low, "high": estimate.high}


def _show(bar: Bar, sync: str, before: int, total: int, message: Mapping[str, Any]) -> None:
    bar.show(before + message["step"], total, sync)


def _draw(path: Path, title: str, rows: Rows) -> Path:
    from thalweg.report import Training, draw_trainings

    trainings = [
        Training(sync=_name(row), losses=row["losses"], seconds=row["seconds"]) for row in rows
    ]
    write_file(path, draw_trainings(title, trainings))
    return path


def _write_page(path: Path, advice: Advice, rows: Rows) -> Path:
    from thalweg.report.advice import MeasuredStepTime, advice_page

    measured = [
        MeasuredStepTime(
            sync=row["chosen"],
            seconds=row["seconds_per_step"],
            predicted=row["predicted"],
            low=row["low"],
            high=row["high"],
        )
        for row in rows
    ]
    write_file(path, advice_page(advice, measured))
    return path


def _ranking(title: str, ranking: Sequence[RankedPlan]) -> Table:
    table = table_of("plan", ">a step", "four of five", ">vs ddp", title=title)
    for ranked in ranking:
        table.add_row(
            str(ranked.plan),
            about(ranked.estimate.seconds, "s"),
            f"{about(ranked.estimate.low, 's')} - {about(ranked.estimate.high, 's')}",
            f"{ranked.vs_ddp:.2f}",
        )
    return table


def _table(title: str, metric: str, rows: Rows) -> Table:
    figures = (">predicted", ">measured", ">final loss", f">{metric}", ">replicas")
    table = table_of("plan", "promise", *figures, title=title)
    for row in rows:
        table.add_row(
            _name(row),
            row["promise"],
            "" if row["predicted"] is None else about(row["predicted"], "s"),
            about(row["seconds_per_step"], "s"),
            f"{row['final_loss']:.4f}",
            f"{row['metric']:.4f}",
            "equal" if row["identical"] else "differ",
        )
    return table


def _name(row: Mapping[str, Any]) -> str:
    """With what was chosen, if something was."""
    sync, chosen = row["sync"], row["chosen"]
    return f"{sync}: {chosen}" if chosen != sync else f"{sync}"

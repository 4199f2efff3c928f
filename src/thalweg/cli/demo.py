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
from thalweg.cli.options import Place, with_bundles
from thalweg.cli.output import (
    Bar,
    JsonOption,
    console,
    progress_bar,
    told_choice,
    write_file,
    write_json,
)
from thalweg.declarations import Promise, listed
from thalweg.errors import LabError, RunError, ThalwegError
from thalweg.facts import Cluster, about
from thalweg.predict import Advice, Advised, advise, predict
from thalweg.report.tables import table_of

if TYPE_CHECKING:
    from thalweg.bench.site import Site
    from thalweg.workloads import Job

JOB = "digits"
WORKERS = 4
LAB, NIC, UPLINK, ORDER = "2x2", "1gbit", "200mbit", "interleaved"
PLANS = ("ddp", "auto")
SHOWN = 5  # plans of the ranking
SETTLING = 2  # steps of a new plan that set it up
Rows = list[dict[str, Any]]

CLOSING = """
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
    place: Place,
    json_path: JsonOption = None,
) -> None:
    """Predict what a step of a small job takes here, then train it under DDP and under auto.

    Four workers in a lab of two racks with thin uplinks, or on this machine as it is where a lab
    can't be had, train a network on scikit-learn's digits. All start from the same values, on the
    same samples; a table, a page and a picture at the end.
    """
    from thalweg.workloads import find_job  # torch takes a second: not at import

    job = find_job(JOB)
    terminal = console(json_path)
    with _site(place) as site:
        title = f"{job.name} on {site.text}"
        advice = _advised(site, job, terminal)
        if advice is not None:
            terminal.print(advice.verdict, markup=False)
            terminal.print(_ranking(f"Best predictions for {title}", advice.ranking[:SHOWN]))
        rows = _trained(site, job, steps, advice)
    told = [f"Picture: {_draw(out / 'training.svg', title, rows)}"]
    if advice is not None:
        told.append(f"Page: {_write_page(out / 'report.html', advice, rows)}")
    terminal.print(_table(f"{title}, {steps} steps", job.metric, rows))
    for row in rows:
        for chosen in row["choices"]:
            terminal.print(f"{row['sync']}, {told_choice(chosen)}", markup=False)
    notes = ["", *site.notes] if site.notes else []
    terminal.print("\n".join([*notes, CLOSING, *told]))
    settings = {
        "workload": job.name,
        "workers": site.workers,
        "steps": steps,
        "lab": site.cluster is not None,
        "verdict": None if advice is None else advice.verdict,
        "notes": site.notes,
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
def _site(place: Place) -> Iterator[Site]:
    """As asked for; else the lab, or else this machine and why."""
    from thalweg.bench.site import Site

    unplaced = place.workers is None and place.lab is None
    chosen = Place(lab=LAB, nic=NIC, uplink=UPLINK, rank_order=ORDER) if unplaced else place
    with ExitStack() as stack:
        try:
            site = stack.enter_context(chosen.site())
        except LabError as error:
            if place.lab is not None:
                raise
            site = Site(workers=WORKERS, notes=[f"no lab, where links have limits: {error}"])
        else:
            if unplaced:
                site = replace(site, notes=[f"NICs of {NIC}, uplinks of {UPLINK}", *site.notes])
        yield site


def _declared(site: Site) -> Cluster:
    """What the workers are told of the network."""
    return site.cluster or Cluster.flat(site.workers)


def _advised(site: Site, job: Job, terminal: Console) -> Advice | None:
    """From a calibration there; training goes on without it, after a line that says why."""
    from thalweg.bench.calibrate_job import calibrate_at

    try:
        with progress_bar("Calibrating") as bar:
            found = calibrate_at(
                site,
                job,
                _declared(site),
                (),
                lambda what, done, total: bar.show(done, total or done + 1, what),
            )
    except ThalwegError as error:
        terminal.print(f"Nothing is predicted, since calibration failed: {error}", markup=False)
        return None
    terminal.print(f"Calibrated in {found.seconds:.0f} s.")
    with progress_bar("Predicting") as bar:
        return advise(
            found.cluster,
            found.workload,
            found.machine,
            declared=_declared(site),
            sweep=True,
            progress=bar.show,
        )


def _trained(site: Site, job: Job, steps: int, advice: Advice | None) -> Rows:
    """A row for each plan, with what was predicted of the plan that it ended with."""
    from thalweg.bench.train_job import step_rows, summary, train_at
    from thalweg.bench.training import Recipe
    from thalweg.training.auto.request import plan_at_first

    catalog = default_catalog()
    rows = []
    with progress_bar("Training") as bar:
        for number, sync in enumerate(PLANS):
            show = partial(_show, bar, sync, number * steps, steps * len(PLANS))
            results = train_at(site, job, sync, Recipe(steps=steps), show)
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
                row |= _predicted(row["chosen"], site, advice)
            rows.append(row)
    return rows


def _since_chosen(chosen: Mapping[str, Any], per_step: Rows) -> dict[str, Any]:
    """What the plan that `auto` ended with takes, but for the steps that set it up."""
    first = chosen["step"] + SETTLING
    seconds = [row["seconds"] for row in per_step if row["step"] > first]
    measured = {"seconds_per_step": fmean(seconds)} if seconds else {}
    return {"chosen": chosen["sync"], **measured}


def _predicted(sync: str, site: Site, advice: Advice) -> dict[str, Any]:
    estimate = predict(
        sync, advice.cluster, advice.workload, advice.machine, declared=_declared(site)
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
    from thalweg.report.advice import Measured, advice_page

    measured = [
        Measured(
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


def _ranking(title: str, ranking: Sequence[Advised]) -> Table:
    table = table_of("plan", ">a step", "four of five", ">vs ddp", title=title)
    for one in ranking:
        table.add_row(
            str(one.plan),
            about(one.estimate.seconds, "s"),
            f"{about(one.estimate.low, 's')} - {about(one.estimate.high, 's')}",
            f"{one.vs_ddp:.2f}",
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

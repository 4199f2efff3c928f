"""`thalweg demo`: a small job on four workers of this machine, predicted and then trained.

Where possible the workers are in a lab: two racks with slow uplinks, and ranks interleaved, as a
scheduler without knowledge of racks would number them. The step time is predicted first, from a
calibration there; then the job is trained under torch's DDP and under `auto`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from thalweg.bench.run_everywhere import Deployment, Report
from thalweg.catalog import default_catalog
from thalweg.cli.options import (
    Output,
    PlaceOptions,
    choice_line,
    option,
    progress_bar,
    with_bundles,
)
from thalweg.cli.predict import RANKING_COLUMNS
from thalweg.declarations import Promise, listed
from thalweg.errors import LabError, RunError, ThalwegError
from thalweg.predict import Advice, Outcome, advise, predict
from thalweg.report.advice import advice_page
from thalweg.report.plots import TrainingCurve, draw_trainings
from thalweg.report.tables import Columns, seconds_text, table_of

if TYPE_CHECKING:
    from thalweg.workloads import Job

DEMO_WORKER_COUNT = 4
DEMO_PLACE = PlaceOptions(lab="2x2", nic="1gbit", uplink="200mbit", rank_order="interleaved")
DEMO_PLANS = ("ddp", "auto")
MAX_SHOWN_PLANS = 5  # of the ranking
PLAN_WARMUP_STEPS = 2  # of a new plan
Rows = list[dict[str, Any]]

CLOSING_TEXT = """
Exact plans end with the same bits on all workers. Try your own cluster: thalweg calibrate,
thalweg advise, thalweg bench train scenarios/oversubscribed-uplink.toml,
thalweg lab up 2x4 --nic 200mbit --uplink 50mbit, thalweg explain hierarchical --lab 2x4"""


@with_bundles
def demo(
    *,
    out: Annotated[Path, option("Folder of the page and the picture.", "DIR")] = Path(
        "thalweg-demo"
    ),
    steps: Annotated[int, option("Number of steps to train.", min=1)] = 60,
    place: PlaceOptions,
    output: Output,
) -> None:
    """Predict the step time of a small job here, then train it under DDP and under auto.

    Four workers train a network on scikit-learn's digits: in a lab of two racks with slow uplinks,
    or on this machine as it is where a lab is impossible. All start from the same values, on the
    same samples; a table, a page and a picture at the end.
    """
    from thalweg.workloads import find_job  # torch takes a second: not at import

    job = find_job("digits")
    with _site(place) as deployment:
        title = f"{job.name} on {deployment.text}"
        advice = _advised(deployment, job, output)
        if advice is not None:
            best, heading = advice.ranking[:MAX_SHOWN_PLANS], f"Best predictions for {title}"
            output.print(advice.verdict, table_of(best, RANKING_COLUMNS, title=heading))
        rows = _trained(deployment, job, steps, advice)
    curves = [
        TrainingCurve(sync=_name(row), losses=row["losses"], seconds=row["seconds"]) for row in rows
    ]
    output.print(table_of(rows, _columns(job.metric), title=f"{title}, {steps} steps"))
    for row in rows:
        for chosen in row["choices"]:
            output.print(f"{row['sync']}, {choice_line(chosen)}")
    notes = ["", *deployment.notes] if deployment.notes else []
    output.print(*notes, CLOSING_TEXT)
    output.write("Picture", out / "training.svg", draw_trainings(title, curves))
    if advice is not None:
        measured = [
            Outcome(
                sync=row["chosen"],
                predicted=row["predicted"],
                low=row["low"],
                high=row["high"],
                measured=row["seconds_per_step"],
            )
            for row in rows
        ]
        output.write("Page", out / "report.html", advice_page(advice, measured))
    output.write_json(
        "demo",
        rows,
        workload=job.name,
        workers=deployment.workers,
        steps=steps,
        lab=deployment.cluster is not None,
        verdict=None if advice is None else advice.verdict,
        notes=deployment.notes,
    )
    wrong = [
        row["sync"]
        for row in rows
        if row["promise"] == Promise.EXACT.value and not row["identical"]
    ]
    if wrong:
        raise RunError(f"replicas differ under {listed(wrong)}", "please report this")


@contextmanager
def _site(place: PlaceOptions) -> Iterator[Deployment]:
    """The place that was asked for; by default a lab, or this machine if there can be none."""
    if place != PlaceOptions():  # `site` says what is missing
        with place.site() as deployment:
            yield deployment
        return
    with ExitStack() as stack:
        try:
            deployment = stack.enter_context(DEMO_PLACE.site())
        except LabError as error:
            note = f"no lab, where links have limits: {error}"
            yield Deployment(workers=DEMO_WORKER_COUNT, notes=[note])
        else:
            rates = f"NICs of {DEMO_PLACE.nic}, uplinks of {DEMO_PLACE.uplink}"
            yield replace(deployment, notes=[rates, *deployment.notes])


def _advised(deployment: Deployment, job: Job, output: Output) -> Advice | None:
    """Advice from a calibration there; None, after a line with the reason, if that failed."""
    from thalweg.bench.calibrate_job import calibrate_at

    try:
        with progress_bar("Calibrating") as show:
            calibration = calibrate_at(deployment, job, deployment.declared, (), show)
    except ThalwegError as error:
        output.print(f"No predictions: calibration failed: {error}")
        return None
    assert calibration is not None  # this process is no launched rank
    output.print(f"Calibrated in {calibration.seconds:.0f} s.")
    with progress_bar("Predicting") as show:
        return advise(calibration.situation, sweep=True, progress=show)


def _trained(deployment: Deployment, job: Job, steps: int, advice: Advice | None) -> Rows:
    """A row for each plan, with the prediction for the plan that it ended with."""
    from thalweg.bench.training import Recipe, step_rows, summary, train_everywhere
    from thalweg.training.auto.request import plan_at_first

    catalog = default_catalog()
    rows = []
    with progress_bar("Training") as show:
        for number, sync in enumerate(DEMO_PLANS):
            on_report = partial(_show, show, sync, number * steps, steps * len(DEMO_PLANS))
            results = train_everywhere(deployment, job, sync, Recipe(steps=steps), on_report)
            per_step = step_rows(results)
            row = {
                "sync": sync,
                "promise": catalog.guarantee(catalog.plan(sync)).promise.value,
                **summary(results, per_step),
                "chosen": str(plan_at_first(catalog.plan(sync))),  # if there were too few steps
                "losses": [step["loss"] for step in per_step],
                "seconds": [step["seconds"] for step in per_step],
            }
            if row["choices"]:
                last = row["choices"][-1]
                row["chosen"], first = last["sync"], last["step"] + PLAN_WARMUP_STEPS
                if timed := [step["seconds"] for step in per_step if step["step"] > first]:
                    row["seconds_per_step"] = fmean(timed)
            estimate = advice and predict(row["chosen"], advice.situation)
            rows.append(
                {
                    **row,
                    "predicted": estimate and estimate.seconds,
                    "low": estimate and estimate.low,
                    "high": estimate and estimate.high,
                }
            )
    return rows


def _show(show: Report, sync: str, before: int, total: int, message: Mapping[str, Any]) -> None:
    show(before + message["step"], total, sync)


def _columns(metric: str) -> Columns:
    return {
        "plan": _name,
        "promise": itemgetter("promise"),
        ">predicted": lambda row: seconds_text(row["predicted"]),
        ">measured": lambda row: seconds_text(row["seconds_per_step"]),
        ">final loss": lambda row: f"{row['final_loss']:.4f}",
        f">{metric}": lambda row: f"{row['metric']:.4f}",
        ">replicas": lambda row: "equal" if row["identical"] else "differ",
    }


def _name(row: Mapping[str, Any]) -> str:
    """The plan, with the one that `auto` chose."""
    sync, chosen = row["sync"], row["chosen"]
    return f"{sync}: {chosen}" if chosen != sync else f"{sync}"

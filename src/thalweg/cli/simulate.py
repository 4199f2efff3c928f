"""`thalweg simulate`: what a step takes under a plan, in depth."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thalweg.catalog import default_catalog
from thalweg.cli.job_options import JobOptions, WhatIfOptions, situation_of
from thalweg.cli.options import with_bundles
from thalweg.cli.output import JsonOption, console, working, write_json
from thalweg.facts import about
from thalweg.predict.estimate import Estimate
from thalweg.predict.plan_detail import PlanDetail, plan_detail
from thalweg.predict.predictor import prediction_input
from thalweg.predict.step_simulator import BucketTimes
from thalweg.report.tables import table_of

MAX_PRINTED_LINKS = 6  # that are printed
BAR_WIDTH_CHARACTERS = 60  # characters
BAR_PART_CHARACTERS = {
    "compute": "█",
    "encode": "▓",
    "decode": "▒",
    "transfer": "░",
    "waiting": "·",
}


@with_bundles
def command(
    sync: Annotated[
        list[str],
        typer.Option("--sync", metavar="PLAN", help="A plan; may be given several times."),
    ],
    asked: JobOptions,
    supposed: WhatIfOptions,
    json_path: JsonOption = None,
) -> None:
    """Replay a few steps of a plan on a cluster's links, and show what they are made of: computing,
    codecs, transfers that nothing hides, waiting; when each bucket was under way on the slowest
    rank; which links were busy; and what the closed form says.

    Nothing is run. Clusters that are too large for a replay have the closed form alone.
    """
    catalog = default_catalog()
    plans = [catalog.plan(text) for text in dict.fromkeys(sync)]
    situation = situation_of(asked, supposed)
    terminal = console(json_path)
    terminal.print(situation.title, markup=False)
    rows = []
    for plan in plans:
        with working(f"Replaying {plan}"):
            found = plan_detail(
                prediction_input(plan, situation.cluster, situation.workload, situation.machine)
            )
        _print(terminal, found)
        rows.append(_row(found))
    assumed = list(dict.fromkeys((*situation.cluster.assumed, *situation.machine.assumed)))
    if assumed:
        terminal.print("\nAssumed: " + "; ".join(assumed) + ".", markup=False)
    write_json(json_path, "simulate", {**situation.settings, "assumed": assumed}, rows)


def _row(found: PlanDetail) -> dict[str, Any]:
    estimate, alone = found.estimate, found.alone
    return {
        "sync": estimate.sync,
        "workers": estimate.workers,
        "seconds": estimate.seconds,
        "low": estimate.low,
        "high": estimate.high,
        "form": estimate.form,
        **{part: getattr(estimate.parts, part) for part in BAR_PART_CHARACTERS},
        "closed_form": None if found.form is None else found.form.seconds,
        "slowest_rank": found.rank if found.passages else None,
        "buckets": [
            {"ready": one.handed_in, "start": one.began, "end": one.ended} for one in found.passages
        ],
        "links": [
            {"link": str(busy.link), "bytes": busy.nbytes, "utilisation": busy.share}
            for busy in found.links
        ],
        "exchange": None
        if alone is None
        else {
            "what": alone.what,
            "bytes": alone.nbytes,
            "seconds": alone.seconds,
            "closed_form": alone.form,
        },
    }


def _print(terminal: Console, found: PlanDetail) -> None:
    estimate = found.estimate
    terminal.print(
        f"\n{estimate.sync}: {about(estimate.seconds, 's')} a step "
        f"({about(estimate.low, 's')} to {about(estimate.high, 's')}), by {estimate.form}",
        markup=False,
    )
    terminal.print(bar_of(estimate), markup=False)
    if found.form is not None and found.form.form != estimate.form:
        ratio = found.form.seconds / estimate.seconds if estimate.seconds else 1.0
        terminal.print(
            f"closed form: {about(found.form.seconds, 's')}, {ratio:.2f} times the replay"
        )
    if found.alone is not None:
        alone = found.alone
        form = "" if alone.form is None else f"; closed form {about(alone.form, 's')}"
        terminal.print(
            f"{alone.what} of {about(alone.nbytes, 'B')} alone: {about(alone.seconds, 's')}{form}",
            markup=False,
        )
    if found.passages:
        terminal.print(f"buckets on rank {found.rank}, the slowest, in its last step:")
        terminal.print(_buckets(found.passages))
    if found.links:
        terminal.print("busiest links:")
        terminal.print(_links(found))


def bar_of(estimate: Estimate, width: int = BAR_WIDTH_CHARACTERS) -> str:
    """Characters in proportion to the parts of a step, and what each stands for."""
    whole = estimate.seconds or 1.0
    parts = {name: getattr(estimate.parts, name) for name in BAR_PART_CHARACTERS}
    bar, done = "", 0.0
    for name, seconds in parts.items():
        done += seconds
        bar += BAR_PART_CHARACTERS[name] * (round(width * done / whole) - len(bar))
    said = [
        f"{BAR_PART_CHARACTERS[n]} {n} {about(s, 's')}"
        for n, s in parts.items()
        if s > 1e-6 * whole
    ]
    return f"{bar}\n{'   '.join(said)}"


def _buckets(passages: tuple[BucketTimes, ...]) -> Table:
    table = table_of(">bucket", ">ready", ">start", ">end", ">took")
    for number, one in enumerate(passages):
        times = (one.handed_in, one.began, one.ended, one.ended - one.began)
        table.add_row(str(number), *(about(seconds, "s") for seconds in times))
    return table


def _links(found: PlanDetail) -> Table:
    table = table_of("link", ">a step", ">of its rate")
    for busy in found.links[:MAX_PRINTED_LINKS]:
        table.add_row(str(busy.link), about(busy.nbytes, "B"), f"{busy.share:.0%}")
    return table

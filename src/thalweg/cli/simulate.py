"""`thalweg simulate`: the step time of a plan, in depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from thalweg.catalog import default_catalog
from thalweg.cli.job_options import JobOptions, WhatIfOptions, situation_of
from thalweg.cli.options import with_bundles
from thalweg.cli.output import JsonOption, console, working, write_json
from thalweg.facts import about
from thalweg.predict.estimate import Estimate
from thalweg.predict.plan_detail import BusyLink, PlanDetail, plan_detail
from thalweg.predict.predictor import prediction_input
from thalweg.report.tables import table_of

MAX_PRINTED_LINKS = 6
BAR_WIDTH_CHARACTERS = 60
BAR_PART_CHARACTERS = dict(
    zip(("compute", "encode", "decode", "transfer", "waiting"), "█▓▒░·", strict=True)
)
BUCKET_COLUMNS: dict[str, Callable[[tuple[int, float, float, float]], str]] = {
    ">bucket": lambda row: str(row[0]),
    ">ready": lambda row: about(row[1], "s"),
    ">start": lambda row: about(row[2], "s"),
    ">end": lambda row: about(row[3], "s"),
    ">took": lambda row: about(row[3] - row[2], "s"),
}
LINK_COLUMNS: dict[str, Callable[[BusyLink], str]] = {
    "link": lambda busy: str(busy.link),
    ">bytes per step": lambda busy: about(busy.nbytes, "B"),
    ">utilization": lambda busy: f"{busy.share:.0%}",
}


@with_bundles
def simulate(
    sync: Annotated[
        list[str],
        typer.Option(metavar="PLAN", help="A plan; may be given several times."),
    ],
    asked: JobOptions,
    supposed: WhatIfOptions,
    json_path: JsonOption = None,
) -> None:
    """Simulate a few steps of a plan on a cluster's links, and show their breakdown: compute,
    codecs, exposed communication, straggler wait; the times of each bucket on the slowest rank; the
    busiest links; and the closed form.

    Nothing is run. Clusters that are too large for a simulation have the closed form alone.
    """
    catalog = default_catalog()
    plans = [catalog.plan(text) for text in dict.fromkeys(sync)]
    situation = situation_of(asked, supposed)
    terminal = console(json_path)
    terminal.print(situation.title)
    rows = []
    for plan in plans:
        with working(f"Simulating {plan}"):
            found = plan_detail(
                prediction_input(plan, situation.cluster, situation.workload, situation.machine)
            )
        _print(terminal, found)
        rows.append(_row(found))
    assumed = list(dict.fromkeys((*situation.cluster.assumed, *situation.machine.assumed)))
    if assumed:
        terminal.print("\nAssumed: " + "; ".join(assumed) + ".")
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
        **asdict(estimate.parts),
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
        f"\n{estimate.sync}: {about(estimate.seconds, 's')} per step "
        f"({about(estimate.low, 's')} to {about(estimate.high, 's')}), "
        f"{'simulated' if estimate.form == 'replay' else f'by {estimate.form}'}"
    )
    terminal.print(bar_of(estimate))
    if found.form is not None and found.form.form != estimate.form:
        ratio = found.form.seconds / estimate.seconds if estimate.seconds else 1.0
        terminal.print(
            f"closed form: {about(found.form.seconds, 's')}, {ratio:.2f} times the simulation"
        )
    if found.alone is not None:
        alone = found.alone
        form = "" if alone.form is None else f"; closed form {about(alone.form, 's')}"
        terminal.print(
            f"{alone.what} of {about(alone.nbytes, 'B')} alone: {about(alone.seconds, 's')}{form}"
        )
    if found.passages:
        terminal.print(f"buckets on rank {found.rank}, the slowest, in its last step:")
        rows = [
            (number, one.handed_in, one.began, one.ended)
            for number, one in enumerate(found.passages)
        ]
        terminal.print(table_of(rows, BUCKET_COLUMNS))
    if found.links:
        terminal.print("busiest links:")
        terminal.print(table_of(found.links[:MAX_PRINTED_LINKS], LINK_COLUMNS))


def bar_of(estimate: Estimate, width: int = BAR_WIDTH_CHARACTERS) -> str:
    """A bar with characters in proportion to the parts of a step, and its legend."""
    whole = estimate.seconds or 1.0
    parts = asdict(estimate.parts)
    bar, done = "", 0.0
    for name, seconds in parts.items():
        done += seconds
        bar += BAR_PART_CHARACTERS[name] * (round(width * done / whole) - len(bar))
    legend = [
        f"{BAR_PART_CHARACTERS[n]} {n} {about(s, 's')}"
        for n, s in parts.items()
        if s > 1e-6 * whole
    ]
    return f"{bar}\n{'   '.join(legend)}"

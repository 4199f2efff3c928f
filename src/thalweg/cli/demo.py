"""`thalweg demo`: the main job on this machine, four workers and a small network to train."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from thalweg.catalog import default_catalog
from thalweg.cli.output import JsonOption, console, write_file, write_json
from thalweg.cli.progress import Bar, progress_bar
from thalweg.declarations import Promise, listed
from thalweg.errors import RunError
from thalweg.facts import about

JOB = "digits"
WORKERS = 4
PLANS = (
    "ddp",
    "ring",
    "halving_doubling",
    "double_tree",
    "gc(stragglers=1)",
    "dssync",
    "local_sgd(every=8)",
)


def command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the picture goes.")] = Path(
        "thalweg-demo"
    ),
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 60,
    json_path: JsonOption = None,
) -> None:
    """Train a network on scikit-learn's digits under torch's DDP and under our plans.

    Four local workers, from the same start, on the same samples; a table and a picture at the end.
    """
    from thalweg.bench.jobs import step_rows, summary, train_locally
    from thalweg.bench.training import Recipe  # torch takes a second: not at import
    from thalweg.report import Training, draw_trainings
    from thalweg.workloads import find_job

    job = find_job(JOB)
    catalog = default_catalog()
    rows: list[dict[str, Any]] = []
    drawn: list[Training] = []
    with progress_bar("Training") as bar:
        for number, sync in enumerate(PLANS):
            show = partial(_show, bar, sync, number * steps, steps * len(PLANS))
            results = train_locally(job, sync, Recipe(steps=steps), WORKERS, show)
            per_step = step_rows(results)
            promise = catalog.guarantee(catalog.plan(sync)).promise.value
            rows.append({"sync": sync, "promise": promise, **summary(results, per_step)})
            drawn.append(
                Training(
                    sync=sync,
                    losses=[row["loss"] for row in per_step],
                    seconds=[row["seconds"] for row in per_step],
                )
            )
    picture = out / "training.svg"
    title = f"{job.name} on {WORKERS} local workers"
    write_file(picture, draw_trainings(title, drawn))
    terminal = console(json_path)
    terminal.print(_table(f"{title}, {steps} steps", job.metric, rows))
    terminal.print(
        "\nExact plans end with the same bits on all workers; under eventual ones replicas differ "
        "and their\nmean is what counts. On one machine no network is slow: see what a plan does "
        f"to yours with\nthalweg explain hierarchical --lab 2x4 --nic 200mbit --uplink 50mbit\n"
        f"Picture: {picture}"
    )
    write_json(json_path, "demo", {"workload": job.name, "workers": WORKERS, "steps": steps}, rows)
    wrong = [
        row["sync"]
        for row in rows
        if row["promise"] == Promise.EXACT.value and not row["identical"]
    ]
    if wrong:
        raise RunError(f"replicas differ under {listed(wrong)}", "please report this")


def _show(bar: Bar, sync: str, before: int, total: int, message: Mapping[str, Any]) -> None:
    bar.show(before + message["step"], total, sync)


def _table(title: str, metric: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("plan", "promise"):
        table.add_column(heading)
    for heading in ("a step", "final loss", metric, "replicas"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["sync"],
            row["promise"],
            about(row["seconds_per_step"], "s"),
            f"{row['final_loss']:.4f}",
            f"{row['metric']:.4f}",
            "equal" if row["identical"] else "differ",
        )
    return table

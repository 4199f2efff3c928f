"""`thalweg demo`: the main job on this machine, four workers and a small network to train.

In a lab where it can be had: two racks with thin uplinks, and ranks that go round them, as a
scheduler that knows nothing of racks would number them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from thalweg.catalog import default_catalog
from thalweg.cli.output import JsonOption, console, write_file, write_json
from thalweg.cli.place import (
    LabOption,
    NicOption,
    OrderOption,
    UplinkOption,
    WorkersOption,
    site_at,
)
from thalweg.cli.progress import Bar, progress_bar
from thalweg.declarations import Promise, listed
from thalweg.errors import LabError, RunError
from thalweg.facts import about

if TYPE_CHECKING:
    from thalweg.bench.site import Site

JOB = "digits"
WORKERS = 4
LAB, NIC, UPLINK, ORDER = "2x2", "1gbit", "200mbit", "interleaved"
PLANS = (
    "ddp",
    "ring",
    "hierarchical",
    "double_tree",
    "gc(stragglers=1)",
    "dssync",
    "local_sgd(every=8)",
)

CLOSING = """
Exact plans end with the same bits on all workers; under eventual ones replicas differ, and their
mean is what counts. Try your own cluster: thalweg bench train scenarios/oversubscribed-uplink.toml,
thalweg lab up 2x4 --nic 200mbit --uplink 50mbit, thalweg explain hierarchical --lab 2x4"""


def command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the picture goes.")] = Path(
        "thalweg-demo"
    ),
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 60,
    workers: WorkersOption = None,
    lab: LabOption = None,
    nic: NicOption = None,
    uplink: UplinkOption = None,
    rank_order: OrderOption = None,
    json_path: JsonOption = None,
) -> None:
    """Train a network on scikit-learn's digits under torch's DDP and under our plans.

    Four workers in a lab of two racks with thin uplinks, or on this machine as it is where a lab
    can't be had. All start from the same values, on the same samples; a table and a picture at the
    end.
    """
    from thalweg.bench.jobs import step_rows, summary, train_at
    from thalweg.bench.training import Recipe  # torch takes a second: not at import
    from thalweg.report import Training, draw_trainings
    from thalweg.workloads import find_job

    job = find_job(JOB)
    catalog = default_catalog()
    rows: list[dict[str, Any]] = []
    drawn: list[Training] = []
    place = _site(workers, lab, nic, uplink, rank_order)
    with place as site, progress_bar("Training") as bar:
        for number, sync in enumerate(PLANS):
            show = partial(_show, bar, sync, number * steps, steps * len(PLANS))
            results = train_at(site, job, sync, Recipe(steps=steps), show)
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
    title = f"{job.name} on {site.text}"
    write_file(picture, draw_trainings(title, drawn))
    terminal = console(json_path)
    terminal.print(_table(f"{title}, {steps} steps", job.metric, rows))
    terminal.print("\n".join(["", *site.notes, CLOSING, f"Picture: {picture}"]))
    settings = {
        "workload": job.name,
        "workers": site.workers,
        "steps": steps,
        "lab": site.cluster is not None,
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
def _site(
    workers: int | None,
    lab: str | None,
    nic: str | None,
    uplink: str | None,
    rank_order: str | None,
) -> Iterator[Site]:
    """As asked for; else the lab, or else this machine and why."""
    from thalweg.bench.site import Site

    chosen = site_at(workers=workers, lab=lab, nic=nic, uplink=uplink, rank_order=rank_order)
    if workers is None and lab is None:
        chosen = site_at(workers=None, lab=LAB, nic=NIC, uplink=UPLINK, rank_order=ORDER)
    with ExitStack() as stack:
        try:
            site = stack.enter_context(chosen)
        except LabError as error:
            if lab is not None:
                raise
            site = Site(workers=WORKERS, notes=[f"no lab, where links have limits: {error}"])
        else:
            if lab is None and workers is None:
                site = replace(site, notes=[f"NICs of {NIC}, uplinks of {UPLINK}", *site.notes])
        yield site


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

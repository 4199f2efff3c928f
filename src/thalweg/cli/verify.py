"""`thalweg verify PLAN`: training under a plan compared with DDP."""

from __future__ import annotations

from operator import itemgetter
from typing import Annotated

import typer

from thalweg.catalog import parse_plan
from thalweg.cli.options import TimeoutOption
from thalweg.cli.output import JsonOption, console, names_among, progress_bar, write_json
from thalweg.declarations import listed
from thalweg.errors import RunError
from thalweg.facts import Duration, counted
from thalweg.report.tables import Columns, table_of

VERIFY_TIMEOUT_SECONDS = 3600.0  # for all trainings together


def verify(
    plans: Annotated[list[str], typer.Argument(metavar="PLAN ...", help="One or more plans.")],
    model: Annotated[
        str,
        typer.Option(
            metavar="WORKLOAD",
            help="A job by name, or your own: a .py file with a function job() in it.",
        ),
    ] = "tinygpt",
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Local processes.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to train.")] = 20,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="plain, accumulation, clipping, 'frozen layer', 'bf16 parameters'; or all",
        ),
    ] = None,
    timeout: TimeoutOption = "5min",
    json_path: JsonOption = None,
) -> None:
    """Train a job under DDP and under each plan, from the same start on the same samples, and
    compare the parameters.

    An exact plan must end with the same bits on all ranks and within 1e-5 of DDP's parameters.
    Exit code 1 if one doesn't.
    """
    from thalweg.bench.training import Recipe  # torch takes a second: not at import
    from thalweg.bench.verify import VARIANTS, verify
    from thalweg.workloads import find_job

    for plan in plans:
        parse_plan(plan)
    known = {each.name: each for each in VARIANTS}
    names = names_among(list(known), variant, "--variant", "variant") if variant else list(known)
    job = find_job(model)
    Duration.parse(timeout)
    with progress_bar(f"Training {job.name}") as bar:
        rows = verify(
            job,
            plans,
            workers=workers,
            recipe=Recipe(steps=steps, timeout=timeout),
            variants=[known[name] for name in names],
            progress=bar.show,
            timeout=VERIFY_TIMEOUT_SECONDS,
        )
    title = f"{job.name}, {counted(steps, 'step')} on {counted(workers, 'worker')}, against DDP"
    console(json_path).print(table_of(rows, _columns(job.metric), title=title))
    settings = {"model": job.name, "workers": workers, "steps": steps, "sync": plans}
    write_json(json_path, "verify", settings, rows)
    wrong = [f"{row['sync']} ({row['variant']})" for row in rows if not row["ok"]]
    if wrong:
        raise RunError(f"{listed(wrong)} didn't train as promised", "see the table")


def _columns(metric: str) -> Columns:
    return {
        "variant": itemgetter("variant"),
        "plan": itemgetter("sync"),
        "promise": itemgetter("promise"),
        ">relative difference": lambda row: f"{row['difference']:.1e}",
        ">tolerance": lambda row: f"{row['tolerance']:.1e}" if row["promise"] == "exact" else "-",
        ">replicas": lambda row: "equal" if row["identical"] else "differ",
        f">{metric}": lambda row: f"{row['metric']:.4f}",
        f">DDP {metric}": lambda row: f"{row['ddp_metric']:.4f}",
        ">": lambda row: "ok" if row["ok"] else "NOT OK",
    }

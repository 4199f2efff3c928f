"""`thalweg verify PLAN`: does it train as DDP does?"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from thalweg.catalog import parse_plan
from thalweg.cli.output import JsonOption, console, progress_bar, write_json
from thalweg.declarations import listed
from thalweg.errors import RunError, UsageError
from thalweg.facts import Duration, counted
from thalweg.report.tables import table_of

VERIFY_TIMEOUT_SECONDS = 3600.0  # seconds for everything


def command(
    plans: Annotated[list[str], typer.Argument(metavar="PLAN ...", help="One or more plans.")],
    model: Annotated[
        str,
        typer.Option(
            metavar="WORKLOAD",
            help="A job by name, or your own: a .py file with a function job() in it.",
        ),
    ] = "tinygpt",
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Local processes.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to train.")] = 20,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="plain, accumulation, clipping, 'frozen layer', 'bf16 parameters'; or all",
        ),
    ] = None,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long a worker waits for the others.")
    ] = "5min",
    json_path: JsonOption = None,
) -> None:
    """Train a job under DDP and under each plan, from the same start on the same samples, and
    compare the parameters.

    An exact plan must end with the same bits on all ranks and within 1e-5 of DDP's parameters.
    Exit code 1 if one doesn't.
    """
    from thalweg.bench.training import Recipe  # torch takes a second: not at import
    from thalweg.bench.verify import verify
    from thalweg.workloads import find_job

    for plan in plans:
        parse_plan(plan)
    chosen = _variants(variant)
    job = find_job(model)
    Duration.parse(timeout)
    with progress_bar(f"Training {job.name}") as bar:
        rows = verify(
            job,
            plans,
            workers=workers,
            recipe=Recipe(steps=steps, timeout=timeout),
            variants=chosen,
            progress=bar.show,
            timeout=VERIFY_TIMEOUT_SECONDS,
        )
    console(json_path).print(_table(job.name, workers, steps, job.metric, rows))
    settings = {"model": job.name, "workers": workers, "steps": steps, "sync": plans}
    write_json(json_path, "verify", settings, rows)
    wrong = [f"{row['sync']} ({row['variant']})" for row in rows if not row["ok"]]
    if wrong:
        raise RunError(f"{listed(wrong)} didn't train as promised", "the table says in what")


def _variants(names: list[str] | None) -> list[Any]:
    from thalweg.bench.verify import VARIANTS

    known = {variant.name: variant for variant in VARIANTS}
    for name in names or ():
        if name not in known:
            raise UsageError(f"there is no variant {name!r}", f"there are {listed(known)}")
    return [known[name] for name in names] if names else list(VARIANTS)


def _table(job: str, workers: int, steps: int, metric: str, rows: list[dict[str, Any]]) -> Table:
    title = f"{job}, {counted(steps, 'step')} on {counted(workers, 'worker')}, against DDP"
    figures = (">apart", ">allowed", ">replicas", f">{metric}", ">DDP's", ">")
    table = table_of("variant", "plan", "promise", *figures, title=title)
    for row in rows:
        exact = row["promise"] == "exact"
        table.add_row(
            row["variant"],
            row["sync"],
            row["promise"],
            f"{row['difference']:.1e}",
            f"{row['tolerance']:.1e}" if exact else "-",
            "equal" if row["identical"] else "differ",
            f"{row['metric']:.4f}",
            f"{row['ddp_metric']:.4f}",
            "ok" if row["ok"] else "NOT OK",
        )
    return table

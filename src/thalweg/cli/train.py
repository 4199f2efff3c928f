"""`thalweg train WORKLOAD`: one of the small jobs, or your own, under a plan.

`thalweg verify PLAN`: training under a plan compared with DDP.

`thalweg run COMMAND`: a training script as several workers on this machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thalweg.catalog import parse_plan
from thalweg.cli.options import (
    Output,
    PlaceOptions,
    RecordsOption,
    RestartsOption,
    TimeoutOption,
    choice_line,
    names_among,
    option,
    progress_bar,
    with_bundles,
)
from thalweg.declarations import listed
from thalweg.errors import RunError, UsageError
from thalweg.facts import Duration, about, counted
from thalweg.launch.launcher_variables import RECORDS_VARIABLE
from thalweg.launch.supervisor import run_command
from thalweg.report.tables import Columns, table_of

if TYPE_CHECKING:
    from thalweg.workloads import Job

JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help="digits, tinygpt, logistic, synthetic(params=2.5M), or a .py file with a job() in it.",
    ),
]
VERIFY_TIMEOUT_SECONDS = 3600.0  # for all trainings together


@with_bundles
def train(
    *,
    workload: JobArgument,
    sync: Annotated[str, option("Synchronisation plan.", "PLAN")] = "ring",
    place: PlaceOptions,
    steps: Annotated[int, option("Number of steps.", min=1)] = 60,
    batch: Annotated[int | None, option("Samples per step of all workers together.", min=1)] = None,
    checkpoint: Annotated[
        Path | None, option("Resume from the newest checkpoint in it, and save there.", "DIR")
    ] = None,
    save_every: Annotated[
        int | None, option("Steps between checkpoints, besides the one at the end.", "STEPS", min=1)
    ] = None,
    timeout: TimeoutOption = "5min",
    restarts: RestartsOption = 0,
    records: RecordsOption = None,
    output: Output,
) -> None:
    """Train a small job under a plan: on local workers, in a lab, or as one of torchrun's workers.

    Ctrl-C stops all workers at the same step; with --checkpoint they save there.
    """
    # torch takes a second: not at import
    from thalweg.bench.training import Recipe, step_rows, summary, train_everywhere
    from thalweg.workloads import find_job

    if save_every is not None and checkpoint is None:
        raise UsageError("--save-every has nowhere to save", "give --checkpoint DIR")
    Duration.parse(timeout)
    parse_plan(sync)
    job = find_job(workload)
    recipe = Recipe(
        steps=steps,
        batch=batch,
        checkpoint=checkpoint,
        save_every=save_every,
        timeout=timeout,
        records=records,
    )
    where, what = place.site(under_launcher=True), f"Training {job.name} under {sync}"
    with where as deployment, progress_bar(what) as show:

        def on_report(message: Mapping[str, Any]) -> None:
            show(message["step"], steps, f"loss {message['loss']:.3f}")

        results = train_everywhere(deployment, job, sync, recipe, on_report, restarts)
    if not results:
        return  # rank 0 reports them
    rows = step_rows(results)
    result = summary(results, rows)
    output.print(_result_text(job, sync, len(results), result), *deployment.notes)
    if len(results) > 1:
        output.print(next(one["summary"] for one in results if one), soft_wrap=True)
    if records is not None:
        output.print(f"recorded in {records}: thalweg report {records}")
    output.write_json(
        "train",
        rows,
        workload=job.name,
        sync=sync,
        workers=len(results),
        batch=batch or job.batch,
        steps=steps,
        metric=job.metric,
        lab=place.lab,
        notes=deployment.notes,
        result=result,
    )


def _result_text(job: Job, sync: str, workers: int, result: Mapping[str, Any]) -> str:
    seconds, loss = result["seconds_per_step"], result["final_loss"]
    timed = [] if seconds is None else [f"loss {loss:.4f}, {about(seconds, 's')} per step"]
    return "\n".join(
        [
            f"{job.name} under {sync} on {counted(workers, 'worker')}: step {result['steps']}",
            *timed,
            f"validation {job.metric} {result['metric']:.4f}",
            f"replicas: {'bitwise identical' if result['identical'] else 'different'}",
            *(
                f"from step {made['step']}: {made['kept_apart']} ({made['reason']})"
                for made in result["adjustments"]
            ),
            *(f"at step {i['step']}: {i['reason']}" for i in result["incidents"]),
            *map(choice_line, result["choices"]),
        ]
    )


@with_bundles
def verify(
    *,
    plans: Annotated[list[str], typer.Argument(metavar="PLAN ...", help="One or more plans.")],
    model: Annotated[
        str,
        option("A job by name, or your own: a .py file with a function job() in it.", "WORKLOAD"),
    ] = "tinygpt",
    workers: Annotated[int, option("Local processes.", "N", min=1)] = 4,
    steps: Annotated[int, option("Number of steps to train.", min=1)] = 20,
    variant: Annotated[
        list[str] | None,
        option("plain, accumulation, clipping, 'frozen layer', 'bf16 parameters'; or all", "NAME"),
    ] = None,
    timeout: TimeoutOption = "5min",
    output: Output,
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
    known = list(VARIANTS)
    variants = names_among(known, variant, "--variant", "variant") if variant else known
    job = find_job(model)
    Duration.parse(timeout)
    with progress_bar(f"Training {job.name}") as show:
        rows = verify(
            job,
            plans,
            workers=workers,
            recipe=Recipe(steps=steps, timeout=timeout),
            variants=variants,
            progress=show,
            timeout=VERIFY_TIMEOUT_SECONDS,
        )
    title = f"{job.name}, {counted(steps, 'step')} on {counted(workers, 'worker')}, against DDP"
    output.print(table_of(rows, _verify_columns(job.metric), title=title))
    output.write_json("verify", rows, model=job.name, workers=workers, steps=steps, sync=plans)
    wrong = [f"{row['sync']} ({row['variant']})" for row in rows if not row["ok"]]
    if wrong:
        raise RunError(f"{listed(wrong)} didn't train as promised", "see the table")


def _verify_columns(metric: str) -> Columns:
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


def run(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND ...", help="A .py file or a program, and its arguments."),
    ],
    workers: Annotated[int, option("Number of workers.", "N", min=1)],
    keep_going: Annotated[
        bool,
        option(
            "Let the others continue if a worker fails, under a plan that tolerates it.",
            None,
            "--keep-going",
        ),
    ] = False,
    restarts: RestartsOption = 0,
    records: RecordsOption = None,
) -> None:
    """Run a script as several workers on this machine, with their output side by side.

    thalweg run --workers 4 train.py --lr 0.1

    A .py file runs in this Python. What torchrun sets is set for each worker: RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR, MASTER_PORT. If one is killed the others continue without it, and with
    --restarts it rejoins. If one fails by itself the others are ended, or with --keep-going
    continue as long as possible; the exit code is 1 in both cases.
    """
    if records is not None:
        os.environ[RECORDS_VARIABLE] = str(records.absolute())
    run_command(workers, with_interpreter(arguments), keep_going=keep_going, restarts=restarts)


def with_interpreter(arguments: list[str]) -> list[str]:
    script = arguments[0]
    if not script.endswith(".py"):
        return arguments
    if not Path(script).is_file():
        raise UsageError(f"there is no file {script}", "name a .py file or a program")
    return [sys.executable, *arguments]

"""`thalweg run`: a training script as several workers on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from thalweg.cli.options import RecordsOption, RestartsOption
from thalweg.errors import UsageError
from thalweg.launch.rank_assignment import RECORDS_VARIABLE
from thalweg.launch.supervisor import run_command


def command(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND ...", help="A .py file or a program, and its arguments."),
    ],
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Number of workers.")],
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="Though a worker fails, under a plan that tolerates it."),
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

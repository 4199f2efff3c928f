"""`thalweg run`: a script of one's own, as several workers on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from thalweg.errors import UsageError
from thalweg.launch.rank_assignment import RECORDS_VARIABLE

RestartsOption = Annotated[
    int,
    typer.Option(min=0, metavar="N", help="Start a worker that is killed again, so many times."),
]


RecordsOption = Annotated[
    Path | None,
    typer.Option("--records", metavar="DIR", help="Record every step there, for `thalweg report`."),
]


def command(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND ...", help="A .py file or a program, and its arguments."),
    ],
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="How many to start.")],
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going", help="Though a worker fails, under a plan that can do without it."
        ),
    ] = False,
    restarts: RestartsOption = 0,
    records: RecordsOption = None,
) -> None:
    """Run a script as several workers on this machine, with their output side by side.

    thalweg run --workers 4 train.py --lr 0.1

    A .py file runs in this Python. What torchrun sets is set for each worker: RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR, MASTER_PORT. If one is killed the others go on without it, and with
    --restarts it comes back. If one fails by itself the others are ended, or with --keep-going go
    on as long as they can; the exit code is 1 either way.
    """
    from thalweg.launch.supervisor import run_command  # torch takes a second: not at import

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

"""Output that all commands share: the console, JSON for scripts, files, and progress bars."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import thalweg
from thalweg.errors import UsageError

PIPE_WIDTH_CHARACTERS = 120
REDRAW_PERIOD_SECONDS = 0.1
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH", help="Write the rows as JSON; - for standard output."),
]


def console(json_path: str | None = None) -> Console:
    """The console for tables; quiet if standard output is for JSON, and wide in a pipe."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH_CHARACTERS
    return _Console(quiet=json_path == "-", highlight=False, width=width)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """A reader that closes the pipe ends the command quietly, in `run`."""
        raise BrokenPipeError


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on a terminal while something long is done; nothing in a pipe."""
    stderr = Console(stderr=True)
    if not stderr.is_terminal:
        yield
        return
    with stderr.status(f"{what} ..."):
        yield


def write_json(
    path: str | None,
    command: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    if path is None:
        return
    document = {
        "command": command,
        "version": thalweg.__version__,
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
    }
    text = json.dumps(document, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        write_file(Path(path), text)


def write_file(path: Path, text: str) -> None:
    """Write a file, and its folder if there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as reason:
        raise UsageError(f"can't write {path}: {reason.strerror}", "name another file") from None


def choice_line(chosen: Mapping[str, Any]) -> str:
    """A choice of `auto` in a line."""
    from thalweg.training.auto.policy import PlanChoice  # torch takes a second: not at import

    made = PlanChoice(**chosen)
    return f"from step {made.step}: {made} ({made.reason})"


class Bar:
    """A progress bar on a terminal, nothing in a pipe. It is drawn on each change, without a
    thread: workers may be forked at any time."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._console = Console(stderr=True)
        self._progress: Progress | None = None
        self._drawn = 0.0

    def show(self, done: int, total: int, note: str = "") -> None:
        if not self._console.is_terminal:
            return
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            end = (TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
            self._progress = Progress(
                *columns, *end, console=self._console, transient=True, auto_refresh=False
            )
            self._task = self._progress.add_task(self._what, total=total, note=note)
            self._progress.start()
        self._progress.update(self._task, completed=done, total=total, note=note)
        if monotonic() - self._drawn >= REDRAW_PERIOD_SECONDS or done == total:
            self._progress.refresh()
            self._drawn = monotonic()

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def progress_bar(what: str) -> Iterator[Bar]:
    bar = Bar(what)
    try:
        yield bar
    finally:
        bar.end()

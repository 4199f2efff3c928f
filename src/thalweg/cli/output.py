"""Output that all commands share: the console, JSON for scripts, files, and progress bars."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import thalweg
from thalweg.errors import UsageError

PIPE_WIDTH_CHARACTERS = 120
REDRAW_PERIOD_SECONDS = 0.1


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """A reader that closes the pipe ends the command quietly, in `run`."""
        raise BrokenPipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output of a command: the console, which is quiet if standard output is for JSON and wide
    in a pipe, files, and JSON for scripts."""

    json_path: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="PATH", help="Write the rows as JSON; - for standard output."
        ),
    ] = None

    @property
    def console(self) -> Console:
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH_CHARACTERS
        return _Console(quiet=self.json_path == "-", highlight=False, markup=False, width=width)

    def print(self, *pieces: RenderableType, **options: Any) -> None:
        """Print texts and tables below one another; nothing if there are none."""
        if pieces:
            self.console.print(*pieces, sep="\n", **options)

    def write(self, what: str, path: Path, text: str) -> None:
        """Write a file, and print what it is and where."""
        write_file(path, text)
        self.print(f"{what}: {path}")

    def write_json(
        self, command: str, rows: Sequence[Mapping[str, Any]], /, **settings: Any
    ) -> None:
        """Write the settings and the rows of a command as JSON, if that was asked for."""
        if self.json_path is None:
            return
        document = {"command": command, "version": thalweg.__version__, "settings": settings}
        text = json.dumps({**document, "rows": rows}, indent=2) + "\n"
        if self.json_path == "-":
            sys.stdout.write(text)
        else:
            write_file(Path(self.json_path), text)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on a terminal while something long is done; nothing in a pipe."""
    stderr = Console(stderr=True)
    if not stderr.is_terminal:
        yield
        return
    with stderr.status(f"{what} ..."):
        yield


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
        stderr = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=stderr,
            transient=True,
            auto_refresh=False,
            disable=not stderr.is_interactive,
        )
        self._task = self._progress.add_task(what, note="")
        self._drawn = 0.0

    def show(self, done: int, total: int, note: str = "") -> None:
        self._progress.start()
        self._progress.update(self._task, completed=done, total=total, note=note)
        if monotonic() - self._drawn >= REDRAW_PERIOD_SECONDS or done == total:
            self._progress.refresh()
            self._drawn = monotonic()

    def end(self) -> None:
        self._progress.stop()


@contextmanager
def progress_bar(what: str) -> Iterator[Bar]:
    bar = Bar(what)
    try:
        yield bar
    finally:
        bar.end()

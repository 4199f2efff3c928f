"""A progress bar on a terminal, nothing in a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

REDRAWN = 0.1  # seconds, at most so often


class Bar:
    """Drawn when there is news, without a thread: workers may be forked at any time."""

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
        if monotonic() - self._drawn >= REDRAWN or done == total:
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

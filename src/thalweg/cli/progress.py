"""A progress bar on a terminal, nothing in a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """Starts with its first news: before, workers are forked, and forks don't like threads."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._console = Console(stderr=True)
        self._progress: Progress | None = None

    def show(self, done: int, total: int, note: str = "") -> None:
        if not self._console.is_terminal:
            return
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            end = (TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
            self._progress = Progress(*columns, *end, console=self._console, transient=True)
            self._task = self._progress.add_task(self._what, total=total, note=note)
            self._progress.start()
        self._progress.update(self._task, completed=done, total=total, note=note)

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

"""What every command prints the same way: JSON for scripts, files, and one-line errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import thalweg
from thalweg.errors import UsageError

PIPE_WIDTH = 120
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH", help="Write the rows as JSON; - for standard output."),
]


def console(json_path: str | None = None) -> Console:
    """Where tables go: nowhere if standard output is for JSON. A pipe has room for wide ones."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return _Console(quiet=json_path == "-", highlight=False, width=width)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader has seen enough; `run` ends quietly."""
        raise BrokenPipeError


@contextmanager
def working(what: str) -> Iterator[None]:
    """A sign of life on a terminal while something long goes on; nothing in a pipe."""
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

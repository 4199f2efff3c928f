"""What every command prints the same way: JSON for scripts, files, and one-line errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import thalweg
from thalweg.errors import UsageError

JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH", help="Write the rows as JSON; - for standard output."),
]


def console(json_path: str | None = None) -> Console:
    """Where tables go: nowhere if standard output is for JSON."""
    return Console(quiet=json_path == "-", highlight=False, soft_wrap=not sys.stdout.isatty())


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
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as reason:
        raise UsageError(f"can't write {path}: {reason.strerror}", "name another file") from None

"""A trace in a file, whose name says how: `.json`, `.json.gz`, or Perfetto's own `.pftrace`."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from thalweg.errors import UsageError
from thalweg.report.trace import Trace
from thalweg.report.trace_json import as_json
from thalweg.report.trace_proto import as_proto, messages


def _text(trace: Trace) -> Iterator[bytes]:
    return (piece.encode() for piece in as_json(trace))


WRITERS: Mapping[str, Callable[[Trace], Iterator[bytes]]] = {
    ".json": _text,
    ".json.gz": _text,
    ".pftrace": as_proto,
}


def writer_of(path: Path) -> Callable[[Trace], Iterator[bytes]]:
    """Or the error that says why there is none."""
    found = [writer for ending, writer in WRITERS.items() if path.name.endswith(ending)]
    if not found:
        raise UsageError(
            f"{path} doesn't say which kind of trace it is to be",
            f"let it end in {', '.join(WRITERS)}",
        )
    if found[0] is as_proto:
        messages()
    return found[0]


def write_trace(path: Path, trace: Trace) -> None:
    pieces = writer_of(path)(trace)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
            for piece in pieces:
                file.write(piece)
    except OSError as reason:
        raise UsageError(f"can't write {path}: {reason.strerror}", "name another file") from None

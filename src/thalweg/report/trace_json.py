"""A trace as Chrome writes it, which ui.perfetto.dev and chrome://tracing open: JSON, an event a
line, so that what was cut off can still be read by most viewers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from thalweg.report.trace import Process, Trace, Track

FIRST = 1000  # process number of rank 0: viewers take 0 for the idle process


def as_json(trace: Trace) -> Iterator[str]:
    """In pieces."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    between = ""
    for event in events(trace):
        yield between + json.dumps(event, separators=(",", ":"))
        between = ",\n"
    about = {"made_by": "thalweg", "remarks": list(trace.remarks)}
    yield f'\n],"otherData":{json.dumps(about)}}}\n'


def events(trace: Trace) -> Iterator[Mapping[str, Any]]:
    for process in trace.processes:
        number = FIRST + process.rank
        yield _meta(number, 0, "process_name", name=process.name)
        yield _meta(number, 0, "process_sort_index", sort_index=process.rank)
        for thread, track in enumerate(process.tracks, start=1):
            yield _meta(number, thread, "thread_name", name=track.name)
            yield _meta(number, thread, "thread_sort_index", sort_index=thread)
            yield from _slices(number, thread, track)
        yield from _counters(number, process)


def _meta(process: int, thread: int, kind: str, **values: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": values}


def _slices(process: int, thread: int, track: Track) -> Iterator[dict[str, Any]]:
    place = {"pid": process, "tid": thread, "cat": track.name.split()[0]}
    for each in track.slices:
        yield {
            "ph": "X",
            **place,
            "name": each.name,
            "ts": each.start,
            "dur": each.end - each.start,
            "args": dict(each.arguments),
        }
    for instant in track.instants:
        about = {"name": instant.name, "ts": instant.at, "args": dict(instant.arguments)}
        yield {"ph": "i", "s": "t", **place, **about}


def _counters(number: int, process: Process) -> Iterator[dict[str, Any]]:
    for counter in process.counters:
        for at, value in counter.values:
            name = f"{counter.name} ({counter.unit})"
            about = {"name": name, "ts": at, "args": {counter.unit: value}}
            yield {"ph": "C", "pid": number, "tid": 0, **about}

"""Trace files: `.json`, `.json.gz`, or Perfetto's own `.pftrace`, by the name of the file.

Perfetto's own format is smaller, faster to open, and has ranks and tracks in order. Its messages
come from the package `perfetto`. A track is described once, then referred to by its number. A rank
is a track with others below it, not a process, since Perfetto shows the processes with most slices
first, whatever their numbers are; it sorts tracks by name.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from thalweg.errors import UsageError
from thalweg.report.trace import Argument, Counter, Process, Trace, Track

FIRST_PROCESS_NUMBER = 1000  # process number of rank 0: viewers take 0 for the idle process
SEQUENCE = 1  # of packets; there is only one writer
PER_RANK = 1 << 16  # track numbers reserved for each rank


def as_proto(trace: Trace) -> Iterator[bytes]:
    """A trace in Perfetto's format, in pieces, each of which is a valid trace."""
    found = messages()
    for process in trace.processes:
        yield from _Writer(found, process).packets()


class _Writer:
    def __init__(self, messages: Any, process: Process) -> None:
        self._messages = messages
        self._process = process
        self._number = (process.rank + 1) * PER_RANK

    def packets(self) -> Iterator[bytes]:
        process = self._process
        yield self._described(self._number, process.name, process.rank, below=False)
        for index, track in enumerate(process.tracks, start=1):
            yield self._described(self._number + index, track.name, index)
            yield self._events(self._number + index, track)
        for index, counter in enumerate(process.counters, start=1 + len(process.tracks)):
            yield self._described(self._number + index, counter.name, index, unit=counter.unit)
            yield self._values(self._number + index, counter)

    def _described(
        self, number: int, name: str, order: int, *, below: bool = True, unit: str = ""
    ) -> bytes:
        whole = self._messages.Trace()
        described = _packet(whole).track_descriptor
        described.uuid = number
        described.name = name
        described.child_ordering = described.EXPLICIT
        described.sibling_order_rank = order
        if below:
            described.parent_uuid = self._number
        if unit:
            described.counter.unit_name = unit
        return _bytes(whole)

    def _events(self, number: int, track: Track) -> bytes:
        whole = self._messages.Trace()
        kinds = self._messages.TrackEvent
        for each in track.slices:
            begun = _event(whole, number, each.start, kinds.TYPE_SLICE_BEGIN)
            begun.name = each.name
            _annotate(begun, each.arguments)
            _event(whole, number, each.end, kinds.TYPE_SLICE_END)
        for instant in track.instants:
            event = _event(whole, number, instant.at, kinds.TYPE_INSTANT)
            event.name = instant.name
            _annotate(event, instant.arguments)
        return _bytes(whole)

    def _values(self, number: int, counter: Counter) -> bytes:
        whole = self._messages.Trace()
        for at, value in counter.values:
            event = _event(whole, number, at, self._messages.TrackEvent.TYPE_COUNTER)
            event.double_counter_value = value
        return _bytes(whole)


def _event(whole: Any, number: int, at: int, kind: int) -> Any:
    packet = _packet(whole)
    packet.timestamp = 1000 * at
    packet.track_event.type = kind
    packet.track_event.track_uuid = number
    return packet.track_event


def _packet(whole: Any) -> Any:
    packet = whole.packet.add()
    packet.trusted_packet_sequence_id = SEQUENCE
    return packet


def _annotate(event: Any, arguments: Mapping[str, Argument]) -> None:
    for name, value in arguments.items():
        annotation = event.debug_annotations.add()
        annotation.name = name
        if isinstance(value, str):
            annotation.string_value = value
        elif isinstance(value, int):
            annotation.int_value = value
        else:
            annotation.double_value = value


def _bytes(whole: Any) -> bytes:
    found: bytes = whole.SerializeToString()
    return found


def messages() -> Any:
    """Perfetto's messages; raises UsageError if the package is absent."""
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError:
        raise UsageError(
            "a trace in Perfetto's own format needs the package perfetto",
            "pip install 'thalweg[trace]', or name a file that ends in .json",
        ) from None
    return perfetto_trace_pb2


def as_json(trace: Trace) -> Iterator[str]:
    """A trace in Chrome's JSON format, for ui.perfetto.dev and chrome://tracing; an event per line,
    so that most viewers can read a truncated file."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    between = ""
    for event in events(trace):
        yield between + json.dumps(event, separators=(",", ":"))
        between = ",\n"
    about = {"made_by": "thalweg", "remarks": list(trace.remarks)}
    yield f'\n],"otherData":{json.dumps(about)}}}\n'


def events(trace: Trace) -> Iterator[Mapping[str, Any]]:
    for process in trace.processes:
        number = FIRST_PROCESS_NUMBER + process.rank
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


def _text(trace: Trace) -> Iterator[bytes]:
    return (piece.encode() for piece in as_json(trace))


WRITERS: Mapping[str, Callable[[Trace], Iterator[bytes]]] = {
    ".json": _text,
    ".json.gz": _text,
    ".pftrace": as_proto,
}


def writer_of(path: Path) -> Callable[[Trace], Iterator[bytes]]:
    """The writer for a file name; raises UsageError if there is none."""
    found = [writer for ending, writer in WRITERS.items() if path.name.endswith(ending)]
    if not found:
        raise UsageError(
            f"{path} has no ending of a trace format",
            f"use one of {', '.join(WRITERS)}",
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

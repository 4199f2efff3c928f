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
from thalweg.report.trace import Trace, Track

FIRST_PROCESS_NUMBER = 1000  # process number of rank 0: viewers take 0 for the idle process
SEQUENCE = 1  # of packets; there is only one writer
PER_RANK = 1 << 16  # track numbers reserved for each rank
VALUE_FIELDS = {str: "string_value", int: "int_value", float: "double_value"}  # of an argument


def as_proto(trace: Trace) -> Iterator[bytes]:
    """A trace in Perfetto's format, in pieces, each of which is a valid trace."""
    kinds = messages()
    for process in trace.processes:
        first = (process.rank + 1) * PER_RANK
        piece = kinds.Trace()
        _describe(piece, first, process.name, process.rank)
        yield piece.SerializeToString()
        for order, track in enumerate(process.tracks, start=1):
            piece = kinds.Trace()
            described = _describe(piece, first + order, track.name, order)
            described.parent_uuid = first
            if track.unit:
                described.counter.unit_name = track.unit
            for at, value in track.values:
                event = _add_event(piece, first + order, at, kinds.TrackEvent.TYPE_COUNTER)
                event.double_counter_value = value
            _add_slices(piece, first + order, track, kinds.TrackEvent)
            yield piece.SerializeToString()


def _describe(piece: Any, number: int, name: str, order: int) -> Any:
    described = _add_packet(piece).track_descriptor
    described.uuid, described.name = number, name
    described.child_ordering, described.sibling_order_rank = described.EXPLICIT, order
    return described


def _add_slices(piece: Any, number: int, track: Track, kinds: Any) -> None:
    for slice_ in track.slices:
        lasts = slice_.end > slice_.start
        kind = kinds.TYPE_SLICE_BEGIN if lasts else kinds.TYPE_INSTANT
        event = _add_event(piece, number, slice_.start, kind)
        event.name = slice_.name
        for name, value in slice_.arguments.items():
            annotation = event.debug_annotations.add()
            annotation.name = name
            setattr(annotation, VALUE_FIELDS[type(value)], value)
        if lasts:
            _add_event(piece, number, slice_.end, kinds.TYPE_SLICE_END)


def _add_event(piece: Any, number: int, at: int, kind: int) -> Any:
    packet = _add_packet(piece)
    packet.timestamp = 1000 * at
    packet.track_event.type = kind
    packet.track_event.track_uuid = number
    return packet.track_event


def _add_packet(piece: Any) -> Any:
    packet = piece.packet.add()
    packet.trusted_packet_sequence_id = SEQUENCE
    return packet


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
    yield '{"displayTimeUnit":"ms","traceEvents":['
    for number, event in enumerate(events(trace)):
        yield (",\n" if number else "\n") + json.dumps(event, separators=(",", ":"))
    about = {"made_by": "thalweg", "remarks": list(trace.remarks)}
    yield f'\n],"otherData":{json.dumps(about)}}}\n'


def events(trace: Trace) -> Iterator[Mapping[str, Any]]:
    for process in trace.processes:
        number = FIRST_PROCESS_NUMBER + process.rank
        yield _meta(number, 0, "process_name", name=process.name)
        yield _meta(number, 0, "process_sort_index", sort_index=process.rank)
        for thread, track in enumerate(process.tracks, start=1):
            if track.slices:
                yield _meta(number, thread, "thread_name", name=track.name)
                yield _meta(number, thread, "thread_sort_index", sort_index=thread)
            place = {"pid": number, "tid": thread, "cat": track.name.split()[0]}
            for slice_ in track.slices:
                lasts = slice_.end > slice_.start
                kind = (
                    {"ph": "X", "dur": slice_.end - slice_.start}
                    if lasts
                    else {"ph": "i", "s": "t"}
                )
                about = {"name": slice_.name, "ts": slice_.start, "args": dict(slice_.arguments)}
                yield {**kind, **place, **about}
            for at, value in track.values:
                about = {"name": f"{track.name} ({track.unit})", "args": {track.unit: value}}
                yield {"ph": "C", "pid": number, "tid": 0, "ts": at, **about}


def _meta(process: int, thread: int, kind: str, **values: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": values}


def _text(trace: Trace) -> Iterator[bytes]:
    return (piece.encode() for piece in as_json(trace))


WRITERS: Mapping[str, Callable[[Trace], Iterator[bytes]]] = {
    ".json": _text,
    ".json.gz": _text,
    ".pftrace": as_proto,
}


def writer_of(path: Path) -> Callable[[Trace], Iterator[bytes]]:
    """The writer for a file name; raises UsageError if there is none."""
    writers = [writer for ending, writer in WRITERS.items() if path.name.endswith(ending)]
    if not writers:
        raise UsageError(
            f"{path} has no ending of a trace format",
            f"use one of {', '.join(WRITERS)}",
        )
    if writers[0] is as_proto:
        messages()
    return writers[0]


def write_trace(path: Path, trace: Trace) -> None:
    pieces = writer_of(path)(trace)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
            for piece in pieces:
                file.write(piece)
    except OSError as reason:
        raise UsageError(f"can't write {path}: {reason.strerror}", "name another file") from None

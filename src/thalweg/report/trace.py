"""A run as tracks of slices, for a trace viewer: a process for each rank, time in microseconds from
the earliest moment on; and the files of traces.

    straggler  periods in which the other ranks waited for this rank, its NIC or its uplink
    events     what was logged
    steps      one after the other
    compute    the safe point, forward, backward and the optimizer of each step
    exposed communication
               before the optimizer if gradients are averaged, after it if parameters are
    encode     compression of buckets
    rounds     exchanges of buckets; overlapping ones have tracks of their own
    exposed, sent
               curves of exposed communication and of the rate to other hosts

Within a step, compute and exposed communication follow one another without a gap, so their slices
add up to it. Slices of a track don't overlap, so there is no nesting.

Files are `.json`, `.json.gz`, or Perfetto's own `.pftrace`, by their names. Perfetto's own format
is smaller, faster to open, and has ranks and tracks in order. Its messages come from the package
`perfetto`. A track is described once, then referred to by its number. A rank is a track with others
below it, not a process, since Perfetto shows the processes with most slices first, whatever their
numbers are; it sorts tracks by name.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from thalweg.errors import UsageError
from thalweg.observe.records import BucketRecord, StepRecord
from thalweg.observe.run_report import RunReport
from thalweg.observe.timeline import RankTimeline

Arguments = Mapping[str, int | float | str]
Clock = Callable[[float], int]
"""The whole microseconds since the earliest moment."""
FIRST_PROCESS_NUMBER = 1000  # process number of rank 0: viewers take 0 for the idle process
SEQUENCE = 1  # of packets; there is only one writer
PER_RANK = 1 << 16  # track numbers reserved for each rank
VALUE_FIELDS = {str: "string_value", int: "int_value", float: "double_value"}  # of an argument


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A period of time, or a moment if it ends where it starts."""

    name: str
    start: int
    end: int
    arguments: Arguments = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Slices one after the other, or a curve of values, each of which holds until the next."""

    name: str
    slices: tuple[Slice, ...] = ()
    unit: str = ""
    values: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    rank: int
    name: str
    tracks: tuple[Track, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    processes: tuple[Process, ...]
    remarks: tuple[str, ...] = ()


def trace(run: RunReport) -> Trace:
    lanes = [
        timeline
        for timeline in run.timeline.rank_timelines.values()
        if timeline.steps or timeline.notes
    ]
    earliest = min(
        chain(
            (event.at for lane in lanes for event in lane.notes),
            (step.begin for lane in lanes for step in lane.steps),
            (r.started for lane in lanes for step in lane.steps for r in step.rounds),
        ),
        default=0.0,
    )

    def time(moment: float) -> int:
        return max(0, round((moment - earliest) * 1e6))

    return Trace(
        processes=tuple(_process(timeline, run, time) for timeline in lanes),
        remarks=run.timeline.remarks,
    )


def _process(timeline: RankTimeline, run: RunReport, time: Clock) -> Process:
    slices: defaultdict[str, list[Slice]] = defaultdict(list)  # by the name of their track
    for step in timeline.steps:
        for name, slice_ in _step_slices(step, time):
            slices[name].append(slice_)
    slices["straggler"] = list(_straggler_slices(timeline, run, time))
    straggler, *phases = (
        Track(name=name, slices=_without_overlaps(slices[name]))
        for name in ("straggler", "steps", "compute", "exposed communication")
    )
    events = Track(name="events", slices=tuple(_events(timeline, time)))
    exchanges = [track for name in ("encode", "rounds") for track in _lanes(name, slices[name])]
    tracks = [straggler, events, *phases, *exchanges, *_curves(timeline.steps, time)]
    digits = len(str(run.timeline.size - 1))  # viewers sort by name
    return Process(
        rank=timeline.rank,
        name=f"rank {timeline.rank:0{digits}} on {timeline.host}",
        tracks=tuple(track for track in tracks if track.slices or track.values),
    )


def _step_slices(step: StepRecord, time: Clock) -> Iterator[tuple[str, Slice]]:
    """The slices of a step, of its phases and of its buckets, each with its track."""
    safe_point_end, first, last, averaged, optimized = _phase_times(step)
    parts: Arguments = {
        "computing_ms": _ms(step.computing),
        "exposed_ms": _ms(step.exposed),
        "hidden_ms": _ms(step.hidden),
        "waiting_ms": _ms(step.settled),
    }
    rows: list[tuple[str, str, float, float, Arguments]] = [
        ("steps", f"step {step.step}", step.begin, step.end, parts),
        ("compute", "safe point", step.begin, safe_point_end, {}),
        ("compute", "forward", safe_point_end, first, {}),
        ("compute", "backward", first, last, {}),
        ("compute", "optimizer", averaged, optimized, {}),
        ("exposed communication", "wait for gradients", last, averaged, {}),
        ("exposed communication", "wait for parameters", optimized, step.end, {}),
        *(
            ("encode", f"encode bucket {bucket}", began, ended, {"bucket": bucket})
            for bucket, began, ended in step.encodings
        ),
        *(
            ("rounds", f"bucket {r.bucket}", r.started, r.ended, _round_arguments(r))
            for r in step.rounds
        ),
    ]
    for track, name, start, end, more in rows:
        arguments = {"step": step.step, **more}
        yield track, Slice(name=name, start=time(start), end=time(end), arguments=arguments)


def _phase_times(step: StepRecord) -> list[float]:
    """The times at which the safe point ends, backward begins and ends, gradients are averaged and
    the optimizer ends. One that is missing, as of a script without an optimizer, is the one before
    it, so that slices follow one another."""
    safe_point_end = step.begin + step.settled
    ascending = accumulate(
        (step.begin, safe_point_end, step.first, step.last, step.averaged, step.optimized), max
    )
    return [min(moment, step.end) for moment in ascending][1:]


def _round_arguments(record: BucketRecord) -> Arguments:
    """The arguments of a round; times are relative to its start."""
    arguments: dict[str, int | float | str] = {
        "bucket": record.bucket,
        "ready_ms": _ms(record.ready - record.started),
    }
    arrivals = sorted(record.peers.items(), key=lambda arrival: arrival[1])
    for peer, at in arrivals:
        arguments["last_arrival"] = f"rank {peer}"
        arguments[f"first_of_rank_{peer}_ms"] = _ms(at - record.started)
    return arguments


def _straggler_slices(timeline: RankTimeline, run: RunReport, time: Clock) -> Iterator[Slice]:
    for episode in sorted(run.stragglers, key=lambda episode: episode.first):
        steps = [step for step in timeline.steps if episode.first <= step.step <= episode.last]
        if timeline.rank in episode.ranks and steps:
            arguments = {"when": episode.when, "cost": episode.cost, "kind": episode.kind.value}
            start, end = time(steps[0].begin), time(steps[-1].end)
            yield Slice(name=episode.why, start=start, end=end, arguments=arguments)


def _events(timeline: RankTimeline, time: Clock) -> Iterator[Slice]:
    for event in sorted(timeline.notes, key=lambda event: event.at):
        arguments: Arguments = {"step": event.step, "topic": event.topic, "text": event.text}
        name, at = f"{event.topic}: {event.text}", time(event.at)
        yield Slice(name=name, start=at, end=at, arguments=arguments)


def _without_overlaps(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """The slices with a positive duration, none before the end of the one before: a rank that was
    restarted may have a clock that is slightly behind."""
    disjoint: list[Slice] = []
    last_end = 0
    for slice_ in slices:
        start = max(last_end, slice_.start)
        if slice_.end > start:
            disjoint.append(replace(slice_, start=start))
            last_end = slice_.end
    return tuple(disjoint)


def _lanes(name: str, slices: Iterable[Slice]) -> Iterator[Track]:
    """The smallest number of tracks without overlapping slices; empty slices are left out."""
    lanes: list[list[Slice]] = []
    for slice_ in sorted(slices, key=lambda slice_: slice_.start):
        if slice_.end > slice_.start:
            free = next((lane for lane in lanes if lane[-1].end <= slice_.start), None)
            if free is None:
                lanes.append(free := [])
            free.append(slice_)
    for index, lane in enumerate(lanes, start=1):
        yield Track(name=name if index == 1 else f"{name} {index}", slices=tuple(lane))


def _curves(steps: Sequence[StepRecord], time: Clock) -> Iterator[Track]:
    if not steps:
        return
    end = (time(steps[-1].end), 0.0)
    exposed = [(time(step.begin), _ms(step.exposed)) for step in steps]
    yield Track(name="exposed", unit="ms", values=(*exposed, end))
    if any(step.flows for step in steps):
        rates = [(time(step.begin), round(mbit(step), 3)) for step in steps]
        yield Track(name="sent", unit="Mbit/s", values=(*rates, end))


def mbit(step: StepRecord) -> float:
    """The rate at which a rank sent to other hosts during a step, in Mbit/s."""
    nbytes = sum(flow.nbytes for flow in step.flows)
    return 8e-6 * nbytes / max(step.seconds, 1e-9)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def as_proto(trace: Trace) -> Iterator[bytes]:
    """A trace in Perfetto's format, in pieces, each of which is a valid trace."""
    proto = messages()
    for process in trace.processes:
        first = (process.rank + 1) * PER_RANK
        packets = [[_described(first, process.name, process.rank)]]
        for order, track in enumerate(process.tracks, start=1):
            packets.append(list(_packets(first, order, track, proto.TrackEvent)))
        for piece in packets:
            numbered = [{"trusted_packet_sequence_id": SEQUENCE, **packet} for packet in piece]
            yield proto.Trace(packet=numbered).SerializeToString()


def _described(number: int, name: str, order: int, **more: Any) -> dict[str, Any]:
    place = {"child_ordering": "EXPLICIT", "sibling_order_rank": order}
    return {"track_descriptor": {"uuid": number, "name": name, **place, **more}}


def _packets(first: int, order: int, track: Track, kinds: Any) -> Iterator[dict[str, Any]]:
    """The description of a track of the rank with track number `first`, and then its events."""
    number = first + order
    unit = {"counter": {"unit_name": track.unit}} if track.unit else {}
    yield _described(number, track.name, order, parent_uuid=first, **unit)

    def event(at: int, kind: int, **more: Any) -> dict[str, Any]:
        return {
            "timestamp": 1000 * at,
            "track_event": {"type": kind, "track_uuid": number, **more},
        }

    for at, value in track.values:
        yield event(at, kinds.TYPE_COUNTER, double_counter_value=value)
    for slice_ in track.slices:
        lasts = slice_.end > slice_.start
        kind = kinds.TYPE_SLICE_BEGIN if lasts else kinds.TYPE_INSTANT
        arguments = [
            {"name": name, VALUE_FIELDS[type(value)]: value}
            for name, value in slice_.arguments.items()
        ]
        yield event(slice_.start, kind, name=slice_.name, debug_annotations=arguments)
        if lasts:
            yield event(slice_.end, kinds.TYPE_SLICE_END)


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


def as_json(trace: Trace) -> Iterator[bytes]:
    """A trace in Chrome's JSON format, for ui.perfetto.dev and chrome://tracing; an event per line,
    so that most viewers can read a truncated file."""
    yield b'{"displayTimeUnit":"ms","traceEvents":['
    for number, event in enumerate(_events_in_json(trace)):
        yield (",\n" if number else "\n").encode() + json.dumps(
            event, separators=(",", ":")
        ).encode()
    about = {"made_by": "thalweg", "remarks": list(trace.remarks)}
    yield f'\n],"otherData":{json.dumps(about)}}}\n'.encode()


def _events_in_json(trace: Trace) -> Iterator[Mapping[str, Any]]:
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


WRITERS: Mapping[str, Callable[[Trace], Iterator[bytes]]] = {
    ".json": as_json,
    ".json.gz": as_json,
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

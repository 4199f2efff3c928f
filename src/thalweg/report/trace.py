"""A run as tracks of slices, for a trace viewer: a process for each rank, time in microseconds from
the earliest moment on.

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
add up to it. Slices of a track don't overlap, so there is no nesting. `trace_file.py` writes files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from thalweg.observe.records import BucketRecord, StepRecord
from thalweg.observe.run_report import RunReport
from thalweg.observe.timeline import RankTimeline

Arguments = Mapping[str, int | float | str]
Clock = Callable[[float], int]
"""The whole microseconds since the earliest moment."""


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
        timeline for timeline in run.run.rank_timelines.values() if timeline.steps or timeline.notes
    ]
    earliest = min((moment for lane in lanes for moment in _first_moments(lane)), default=0.0)

    def time(moment: float) -> int:
        return max(0, round((moment - earliest) * 1e6))

    return Trace(
        processes=tuple(_process(timeline, run, time) for timeline in lanes),
        remarks=run.run.remarks,
    )


def _first_moments(timeline: RankTimeline) -> Iterator[float]:
    """Times among which is the earliest: rounds may begin before the first step that is shown."""
    yield from (event.at for event in timeline.notes)
    for step in timeline.steps[:8]:
        yield from (step.begin, *(each.started for each in step.rounds))


def _process(timeline: RankTimeline, run: RunReport, time: Clock) -> Process:
    found: defaultdict[str, list[Slice]] = defaultdict(list)
    for step in timeline.steps:
        for name, slice_ in _step_slices(step, time):
            found[name].append(slice_)
    found["straggler"] = list(_straggler_slices(timeline, run, time))
    straggler, *phases = (
        Track(name=name, slices=_without_overlaps(found[name]))
        for name in ("straggler", "steps", "compute", "exposed communication")
    )
    events = Track(name="events", slices=tuple(_events(timeline, time)))
    exchanges = [track for name in ("encode", "rounds") for track in _lanes(name, found[name])]
    tracks = [straggler, events, *phases, *exchanges, *_curves(timeline.steps, time)]
    digits = len(str(run.run.size - 1))  # viewers sort by name
    return Process(
        rank=timeline.rank,
        name=f"rank {timeline.rank:0{digits}} on {timeline.host}",
        tracks=tuple(track for track in tracks if track.slices or track.values),
    )


def _step_slices(step: StepRecord, time: Clock) -> Iterator[tuple[str, Slice]]:
    """The slices of a step, of its phases and of its buckets, each with its track."""
    settled, first, last, averaged, optimized = _in_order(step)
    parts: Arguments = {
        "computing_ms": _ms(step.computing),
        "exposed_ms": _ms(step.exposed),
        "hidden_ms": _ms(step.hidden),
        "waiting_ms": _ms(step.settled),
    }
    rows: list[tuple[str, str, float, float, Arguments]] = [
        ("steps", f"step {step.step}", step.begin, step.end, parts),
        ("compute", "safe point", step.begin, settled, {}),
        ("compute", "forward", settled, first, {}),
        ("compute", "backward", first, last, {}),
        ("compute", "optimizer", averaged, optimized, {}),
        ("exposed communication", "wait for gradients", last, averaged, {}),
        ("exposed communication", "wait for parameters", optimized, step.end, {}),
        *(
            ("encode", f"encode bucket {bucket}", began, ended, {"bucket": bucket})
            for bucket, began, ended in step.encodings
        ),
        *(
            ("rounds", f"bucket {each.bucket}", each.started, each.ended, _about_round(each))
            for each in step.rounds
        ),
    ]
    for track, name, start, end, more in rows:
        about = {"step": step.step, **more}
        yield track, Slice(name=name, start=time(start), end=time(end), arguments=about)


def _in_order(step: StepRecord) -> list[float]:
    """The times of a step's phases in ascending order; a script without an optimizer has no time
    for it."""
    settled = step.begin + step.settled
    found = accumulate(
        (step.begin, settled, step.first, step.last, step.averaged, step.optimized), max
    )
    return [min(moment, step.end) for moment in found][1:]


def _about_round(each: BucketRecord) -> Arguments:
    """The arguments of a round; times are relative to its start."""
    about: dict[str, int | float | str] = {
        "bucket": each.bucket,
        "ready_ms": _ms(each.ready - each.started),
    }
    came = sorted(each.peers.items(), key=lambda peer: peer[1])
    if came:
        about["last_arrival"] = f"rank {came[-1][0]}"
        about |= {f"first_of_rank_{peer}_ms": _ms(at - each.started) for peer, at in came}
    return about


def _straggler_slices(timeline: RankTimeline, run: RunReport, time: Clock) -> Iterator[Slice]:
    for each in sorted(run.stragglers, key=lambda each: each.first):
        inside = [step for step in timeline.steps if each.first <= step.step <= each.last]
        if timeline.rank in each.ranks and inside:
            about = {"when": each.when, "cost": each.cost, "kind": each.kind.value}
            start, end = time(inside[0].begin), time(inside[-1].end)
            yield Slice(name=each.why, start=start, end=end, arguments=about)


def _events(timeline: RankTimeline, time: Clock) -> Iterator[Slice]:
    for event in sorted(timeline.notes, key=lambda event: event.at):
        about: Arguments = {"step": event.step, "topic": event.topic, "text": event.text}
        name, at = f"{event.topic}: {event.text}", time(event.at)
        yield Slice(name=name, start=at, end=at, arguments=about)


def _without_overlaps(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """The slices with a positive duration, none before the end of the one before: a rank that was
    restarted may have a clock that is slightly behind."""
    found: list[Slice] = []
    reached = 0
    for each in slices:
        start = max(reached, each.start)
        if each.end > start:
            found.append(replace(each, start=start))
            reached = each.end
    return tuple(found)


def _lanes(name: str, slices: Iterable[Slice]) -> Iterator[Track]:
    """The smallest number of tracks without overlapping slices; empty slices are left out."""
    lanes: list[list[Slice]] = []
    for each in sorted(slices, key=lambda each: each.start):
        if each.end > each.start:
            free = next((lane for lane in lanes if lane[-1].end <= each.start), None)
            if free is None:
                lanes.append(free := [])
            free.append(each)
    for index, lane in enumerate(lanes, start=1):
        yield Track(name=name if index == 1 else f"{name} {index}", slices=tuple(lane))


def _curves(steps: Sequence[StepRecord], time: Clock) -> Iterator[Track]:
    if not steps:
        return
    over = (time(steps[-1].end), 0.0)
    exposed = [(time(step.begin), _ms(step.exposed)) for step in steps]
    yield Track(name="exposed", unit="ms", values=(*exposed, over))
    if any(step.flows for step in steps):
        rates = [(time(step.begin), round(mbit(step), 3)) for step in steps]
        yield Track(name="sent", unit="Mbit/s", values=(*rates, over))


def mbit(step: StepRecord) -> float:
    """The rate at which a rank sent to other hosts during a step, in Mbit/s."""
    nbytes = sum(flow.nbytes for flow in step.flows)
    return 8e-6 * nbytes / max(step.seconds, 1e-9)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)

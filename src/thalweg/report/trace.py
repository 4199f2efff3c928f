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

Within a step, compute and exposed communication follow one another without a gap, so their slices
add up to it. Slices of a track don't overlap, so there is no nesting. `trace_file.py` writes files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from thalweg.observe.records import BucketRecord, StepRecord
from thalweg.observe.run_report import RunReport
from thalweg.observe.timeline import RankTimeline

Argument = int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    name: str
    start: int
    end: int
    arguments: Mapping[str, Argument] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    name: str
    at: int
    arguments: Mapping[str, Argument] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    name: str
    slices: tuple[Slice, ...] = ()
    instants: tuple[Instant, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A series of values, each of which holds until the next."""

    name: str
    unit: str
    values: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    rank: int
    name: str
    tracks: tuple[Track, ...]
    counters: tuple[Counter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    processes: tuple[Process, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Time:
    """A clock in whole microseconds since `start`."""

    start: float

    def __call__(self, moment: float) -> int:
        return max(0, round((moment - self.start) * 1e6))

    def slice(
        self, name: str, start: float, end: float, arguments: Mapping[str, Argument] | None = None
    ) -> Slice:
        begin = self(start)
        return Slice(
            name=name, start=begin, end=max(begin, self(end)), arguments=dict(arguments or {})
        )


def trace(run: RunReport) -> Trace:
    lanes = [
        timeline for timeline in run.run.rank_timelines.values() if timeline.steps or timeline.notes
    ]
    moments = [moment for timeline in lanes for moment in _earliest(timeline)]
    time = _Time(min(moments, default=0.0))
    return Trace(
        processes=tuple(_process(timeline, run, time) for timeline in lanes),
        remarks=run.run.remarks,
    )


def _earliest(timeline: RankTimeline) -> Iterator[float]:
    """Times among which is the earliest: rounds may begin before the first step that is shown."""
    yield from (event.at for event in timeline.notes)
    for step in timeline.steps[:8]:
        yield from (step.begin, *(each.started for each in step.rounds))


def _process(timeline: RankTimeline, run: RunReport, time: _Time) -> Process:
    tracks = [
        Track(name="straggler", slices=tuple(_without_overlaps(_late(timeline, run, time)))),
        Track(name="events", instants=tuple(_notes(timeline, time))),
        Track(
            name="steps",
            slices=tuple(_without_overlaps(_step(step, time) for step in timeline.steps)),
        ),
        Track(name="compute", slices=tuple(_without_overlaps(_compute(timeline.steps, time)))),
        Track(
            name="exposed communication",
            slices=tuple(_without_overlaps(_wait(timeline.steps, time))),
        ),
        *_lanes("encode", _shown(_encode(timeline.steps, time))),
        *_lanes("rounds", _shown(_rounds(timeline.steps, time))),
    ]
    digits = len(str(run.run.size - 1))  # viewers sort by name
    return Process(
        rank=timeline.rank,
        name=f"rank {timeline.rank:0{digits}} on {timeline.host}",
        tracks=tuple(track for track in tracks if track.slices or track.instants),
        counters=tuple(_counters(timeline.steps, time)),
    )


def _shown(slices: Iterable[Slice]) -> Iterator[Slice]:
    """The slices with a positive duration."""
    return (each for each in slices if each.end > each.start)


def _without_overlaps(slices: Iterable[Slice]) -> Iterator[Slice]:
    """The slices with a positive duration, none before the end of the one before: a rank that was
    restarted may have a clock that is slightly behind."""
    reached = 0
    for each in slices:
        start = max(reached, each.start)
        if each.end > start:
            yield replace(each, start=start)
            reached = each.end


def _late(timeline: RankTimeline, run: RunReport, time: _Time) -> Iterator[Slice]:
    for each in sorted(run.stragglers, key=lambda each: each.first):
        inside = [step for step in timeline.steps if each.first <= step.step <= each.last]
        if timeline.rank in each.ranks and inside:
            about = {"when": each.when, "cost": each.cost, "kind": each.kind.value}
            yield time.slice(each.why, inside[0].begin, inside[-1].end, about)


def _notes(timeline: RankTimeline, time: _Time) -> Iterator[Instant]:
    for event in sorted(timeline.notes, key=lambda event: event.at):
        about: dict[str, Argument] = {"step": event.step, "topic": event.topic, "text": event.text}
        yield Instant(name=f"{event.topic}: {event.text}", at=time(event.at), arguments=about)


def _step(step: StepRecord, time: _Time) -> Slice:
    about: dict[str, Argument] = {
        "step": step.step,
        "computing_ms": _ms(step.computing),
        "exposed_ms": _ms(step.exposed),
        "hidden_ms": _ms(step.hidden),
        "waiting_ms": _ms(step.settled),
    }
    return time.slice(f"step {step.step}", step.begin, step.end, about)


def _compute(steps: Iterable[StepRecord], time: _Time) -> Iterator[Slice]:
    for step in steps:
        about: dict[str, Argument] = {"step": step.step}
        settled, first, last, averaged, optimized = _in_order(step)
        yield time.slice("safe point", step.begin, settled, about)
        yield time.slice("forward", settled, first, about)
        yield time.slice("backward", first, last, about)
        yield time.slice("optimizer", averaged, optimized, about)


def _wait(steps: Iterable[StepRecord], time: _Time) -> Iterator[Slice]:
    for step in steps:
        about: dict[str, Argument] = {"step": step.step}
        _, _, last, averaged, optimized = _in_order(step)
        yield time.slice("wait for gradients", last, averaged, about)
        yield time.slice("wait for parameters", optimized, step.end, about)


def _in_order(step: StepRecord) -> list[float]:
    """The times of a step's phases in ascending order; a script without an optimizer has no time
    for it."""
    settled = step.begin + step.settled
    found = accumulate(
        (step.begin, settled, step.first, step.last, step.averaged, step.optimized), max
    )
    return [min(moment, step.end) for moment in found][1:]


def _encode(steps: Iterable[StepRecord], time: _Time) -> Iterator[Slice]:
    for step in steps:
        for each in step.encodings:
            about: dict[str, Argument] = {"step": step.step, "bucket": each.bucket}
            yield time.slice(f"encode bucket {each.bucket}", each.began, each.ended, about)


def _rounds(steps: Iterable[StepRecord], time: _Time) -> Iterator[Slice]:
    for step in steps:
        for each in step.rounds:
            about = _about_round(step, each)
            yield time.slice(f"bucket {each.bucket}", each.started, each.ended, about)


def _about_round(step: StepRecord, each: BucketRecord) -> dict[str, Argument]:
    """The arguments of a round; times are relative to its start."""
    about: dict[str, Argument] = {
        "step": step.step,
        "bucket": each.bucket,
        "ready_ms": _ms(each.ready - each.started),
    }
    came = sorted(each.peers.items(), key=lambda peer: peer[1])
    if came:
        about["last_arrival"] = f"rank {came[-1][0]}"
        about |= {f"first_of_rank_{peer}_ms": _ms(at - each.started) for peer, at in came}
    return about


def _lanes(name: str, slices: Iterable[Slice]) -> list[Track]:
    """The smallest number of tracks without overlapping slices."""
    lanes: list[list[Slice]] = []
    for each in sorted(slices, key=lambda each: (each.start, each.end)):
        free = next((lane for lane in lanes if lane[-1].end <= each.start), None)
        if free is None:
            lanes.append([each])
        else:
            free.append(each)
    return [
        Track(name=name if index == 0 else f"{name} {index + 1}", slices=tuple(lane))
        for index, lane in enumerate(lanes)
    ]


def _counters(steps: Sequence[StepRecord], time: _Time) -> Iterator[Counter]:
    if not steps:
        return
    over = (time(steps[-1].end), 0.0)
    exposed = [(time(step.begin), _ms(step.exposed)) for step in steps]
    yield Counter(name="exposed", unit="ms", values=(*exposed, over))
    if any(step.flows for step in steps):
        rates = [(time(step.begin), round(mbit(step), 3)) for step in steps]
        yield Counter(name="sent", unit="Mbit/s", values=(*rates, over))


def mbit(step: StepRecord) -> float:
    """The rate at which a rank sent to other hosts during a step, in Mbit/s."""
    nbytes = sum(flow.nbytes for flow in step.flows)
    return 8e-6 * nbytes / max(step.seconds, 1e-9)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)

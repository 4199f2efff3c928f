"""All ranks of a run on one clock, each step once.

A rank records times of its own clock, and now and then the offset of the run's common clock
(`ClockSample`). A rank without offsets is aligned by the ends of the steps that it has in common
with the others, by their median, and a remark says so.

A restarted rank appends to the same file. Its clock is another one if its host is, or if it shows
less than before. A repeated step replaces the earlier one and all that had come after that.

    run's time = t + offset(t)

The offset of a rank's clock is known at a few moments, straight between two of them, and constant
before the first and after the last. Where two of them are further apart than clocks drift, the
clock was set, and the earlier holds until the later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median
from typing import Self

from thalweg.errors import ranks_text
from thalweg.facts import Cluster, Host, Rack, grouped
from thalweg.facts.cluster import assumptions
from thalweg.observe.records import (
    BucketRecord,
    ClockSample,
    EncodeRecord,
    EventRecord,
    Record,
    RunHeader,
    StepRecord,
)

REBOOT_CLOCK_SLACK_SECONDS = 10.0  # seconds: a host that was started again shows less by more
MAX_CLOCK_DRIFT_RATIO = 1e-3  # seconds a second, at most: a kernel slews a clock by half of it


class Aligned(StrEnum):
    CLOCK = "clock"  # compared with the run's common one
    STEPS = "steps"  # by when its steps end
    NOT = "not"  # nothing to go by: it begins when the others do


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """The steps and events of one rank on the run's clock. `error` is the clock's error in seconds,
    if known; `openings` are the first steps of its membership epochs."""

    rank: int
    host: str
    rack: str
    steps: tuple[StepRecord, ...]
    notes: tuple[EventRecord, ...]
    openings: tuple[tuple[int, RunHeader], ...]
    aligned: Aligned
    error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The timelines of all ranks; `size` is the number of ranks of the run, and `remarks` say how
    the clocks were aligned."""

    rank_timelines: Mapping[int, RankTimeline]
    size: int
    remarks: tuple[str, ...] = ()

    @property
    def steps(self) -> range:
        """The range of all recorded steps."""
        numbers = [step.step for lane in self.rank_timelines.values() for step in lane.steps]
        return range(min(numbers), max(numbers) + 1) if numbers else range(0)

    @property
    def by_rank(self) -> dict[int, tuple[StepRecord, ...]]:
        return {rank: lane.steps for rank, lane in self.rank_timelines.items()}

    @property
    def member_spans(self) -> list[tuple[int, tuple[int, ...]]]:
        """The steps at which members or the plan changed, each with the members from then on."""
        openings = [opening for lane in self.rank_timelines.values() for opening in lane.openings]
        changes: dict[int, tuple[int, ...]] = {}
        before: tuple[object, ...] = ()
        for step, header in sorted(openings, key=lambda opening: opening[0]):
            if (header.members, header.sync) != before:
                before = header.members, header.sync
                changes[step] = header.members or tuple(self.rank_timelines)
        plans = {
            n.step for lane in self.rank_timelines.values() for n in lane.notes if n.topic == "plan"
        }
        for step in sorted(plans - changes.keys()):
            earlier = [members for other, members in sorted(changes.items()) if other < step]
            changes[step] = earlier[-1] if earlier else tuple(self.rank_timelines)
        return sorted(changes.items())

    def cut(self, first: int | None, last: int | None) -> Timeline:
        """The timeline of the steps from `first` to `last`, both included; None is no limit."""

        def inside(step: int) -> bool:
            return (first is None or step >= first) and (last is None or step <= last)

        lanes = {
            rank: replace(
                lane,
                steps=tuple(step for step in lane.steps if inside(step.step)),
                notes=tuple(event for event in lane.notes if inside(event.step)),
            )
            for rank, lane in self.rank_timelines.items()
        }
        return replace(self, rank_timelines=lanes)


@dataclass(slots=True, eq=False)
class _ProcessLife:
    """The records of a rank during which one clock ran, and the offsets of that clock."""

    host: str
    clock: ClockOffsets = field(default_factory=lambda: ClockOffsets.shifted(0.0))
    aligned: Aligned = Aligned.NOT
    moments: list[ClockSample] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    notes: list[EventRecord] = field(default_factory=list)
    latest: float = float("-inf")  # the last time of that clock in these records


@dataclass(slots=True)
class _RankRecords:
    """The records in a rank's file, by its own clocks."""

    rank: int
    lives: list[_ProcessLife] = field(default_factory=lambda: [_ProcessLife("")])
    openings: list[tuple[int, RunHeader]] = field(default_factory=list)

    @property
    def opening(self) -> RunHeader | None:
        return self.openings[-1][1] if self.openings else None

    @property
    def steps(self) -> list[StepRecord]:
        return [step for life in self.lives for step in life.steps]


def timeline(records: Mapping[int, Iterable[Record]]) -> Timeline:
    """The timeline of all ranks' records, which are oldest first."""
    by_rank = {rank: _rank_records(rank, written) for rank, written in sorted(records.items())}
    headers = (rank_records.opening for rank_records in by_rank.values())
    sizes = (header.size for header in headers if header is not None)
    size = next(sizes, max(by_rank, default=-1) + 1)
    of_run = {rank: rank_records for rank, rank_records in by_rank.items() if rank < size}
    _align([life for rank_records in of_run.values() for life in rank_records.lives])
    lanes = {rank: _lane(rank_records) for rank, rank_records in of_run.items()}
    aligned = grouped((lane.aligned, rank) for rank, lane in lanes.items())
    remarks = (
        (
            [rank for rank in by_rank if rank >= size],
            f"excluded, as the run had {size} ranks: records of an earlier run",
        ),
        (
            [rank for rank in range(size) if rank not in of_run or not of_run[rank].steps],
            "no steps on record",
        ),
        (
            aligned.get(Aligned.STEPS, []),
            "no clock comparison on record; aligned by the ends of steps",
        ),
        (
            aligned.get(Aligned.NOT, []),
            "no clock comparison on record, and no step in common with others",
        ),
    )
    texts = (f"{ranks_text(ranks)}: {remark}" for ranks, remark in remarks if ranks)
    return Timeline(rank_timelines=lanes, size=size, remarks=tuple(texts))


def cluster_of(run: Timeline) -> Cluster:
    """The cluster that the ranks recorded; rates are assumed. Ranks without records have a host
    each, in the first rack."""
    peers = [
        flow.peer for lane in run.rank_timelines.values() for s in lane.steps for flow in s.flows
    ]
    hosts: dict[str, list[int]] = {}
    racks: dict[str, list[str]] = {}
    first = next((lane.rack for lane in run.rank_timelines.values()), "rack0")
    for rank in range(max([run.size, *(peer + 1 for peer in peers)])):
        lane = run.rank_timelines.get(rank)
        host, rack = (f"host of rank {rank}", first) if lane is None else (lane.host, lane.rack)
        if host not in hosts:
            racks.setdefault(rack, []).append(host)
        hosts.setdefault(host, []).append(rank)
    return Cluster(
        racks=tuple(
            Rack(name=rack, hosts=tuple(Host(name=n, ranks=tuple(hosts[n])) for n in names))
            for rack, names in racks.items()
        ),
        assumed=assumptions(nic=True, latency=True),
    )


def _rank_records(rank: int, records: Iterable[Record]) -> _RankRecords:
    told = _RankRecords(rank)
    pending: RunHeader | None = None
    seen: set[RunHeader] = set()
    for record in records:
        if isinstance(record, RunHeader):
            if record not in seen:  # a file that was begun anew repeats it
                seen.add(record)
                pending = record
                _begin_life(told, record)
            continue
        life = told.lives[-1]
        if isinstance(record, ClockSample):
            life.moments.append(record)
        elif isinstance(record, EventRecord):
            life.notes.append(record)
            life.latest = max(life.latest, record.at)
        else:
            formed = _undone(told, record.step)
            pending = formed if pending is None else pending
            if pending is not None:
                told.openings.append((record.step, pending))
                pending = None
            life.steps.append(record)
            life.latest = max(life.latest, record.end)
    if pending is not None:
        told.openings.append((told.steps[-1].step + 1 if told.steps else 0, pending))
    return told


def _begin_life(told: _RankRecords, header: RunHeader) -> None:
    last = told.lives[-1]
    last.host = last.host or header.host  # a clock may have been compared before it
    if last.host != header.host or header.at < last.latest - REBOOT_CLOCK_SLACK_SECONDS:
        last = _ProcessLife(header.host)
        told.lives.append(last)
    last.latest = max(last.latest, header.at)


def _undone(told: _RankRecords, step: int) -> RunHeader | None:
    """Remove a repeated step and all later ones; the header of their epoch, if that began no
    earlier."""
    for life in reversed(told.lives):
        while life.steps and life.steps[-1].step >= step:
            life.steps.pop()
        if life.steps:
            break
    formed = None
    while told.openings and told.openings[-1][0] >= step:
        formed = formed or told.openings[-1][1]
        told.openings.pop()
    return formed


def _align(lives: Sequence[_ProcessLife]) -> None:
    """Set the clock of each life, by its comparisons or else by the ends of its steps."""
    known = [life for life in lives if life.moments]
    for life in known:
        life.clock, life.aligned = ClockOffsets.of(life.moments), Aligned.CLOCK
    if lives and not any(life.steps for life in known):  # the one with most steps is as good
        longest = max(lives, key=lambda life: len(life.steps))
        longest.clock, longest.aligned = ClockOffsets.shifted(0.0), Aligned.STEPS
        known.append(longest)
    ends = grouped((step.step, life.clock(step.end)) for life in known for step in life.steps)
    begin = min((life.clock(life.steps[0].begin) for life in known if life.steps), default=0.0)
    for life in lives:
        if life in known:
            continue
        apart = [median(ends[step.step]) - step.end for step in life.steps if step.step in ends]
        if apart:
            life.clock, life.aligned = ClockOffsets.shifted(median(apart)), Aligned.STEPS
        else:
            own = life.steps[0].begin if life.steps else life.latest
            life.clock = ClockOffsets.shifted(begin - own)


def _lane(told: _RankRecords) -> RankTimeline:
    lives = [life for life in told.lives if life.steps or life.notes]
    worst = max((life.aligned for life in lives), key=list(Aligned).index, default=Aligned.NOT)
    header = told.opening
    return RankTimeline(
        rank=told.rank,
        host=header.host if header else f"host of rank {told.rank}",
        rack=header.rack if header else "rack0",
        steps=tuple(_shifted(step, life.clock) for life in lives for step in life.steps),
        notes=tuple(
            replace(event, at=life.clock(event.at)) for life in lives for event in life.notes
        ),
        openings=tuple(told.openings),
        aligned=worst,
        error=max(life.clock.error for life in lives) if worst is Aligned.CLOCK else None,
    )


def _shifted(step: StepRecord, clock: ClockOffsets) -> StepRecord:
    return replace(
        step,
        begin=clock(step.begin),
        first=clock(step.first),
        last=clock(step.last),
        averaged=clock(step.averaged),
        optimized=clock(step.optimized),
        end=clock(step.end),
        rounds=tuple(_shifted_round(each, clock) for each in step.rounds),
        encodings=tuple(
            EncodeRecord(each.bucket, clock(each.began), clock(each.ended))
            for each in step.encodings
        ),
    )


def _shifted_round(record: BucketRecord, clock: ClockOffsets) -> BucketRecord:
    started = clock(record.started)
    offset = started - record.started  # clocks don't drift much in a round, and peers are many
    peers = {peer: came + offset for peer, came in record.peers.items()}
    return BucketRecord(record.bucket, clock(record.ready), started, clock(record.ended), peers)


@dataclass(frozen=True, slots=True)
class ClockOffsets:
    """The measured clock offsets in order of time; at least one."""

    moments: tuple[ClockSample, ...]

    @classmethod
    def of(cls, moments: Iterable[ClockSample]) -> Self:
        """The offsets from these samples; of two at the same time, the later counts."""
        samples = {moment.at: moment for moment in moments}
        return cls(tuple(samples[at] for at in sorted(samples)))

    @classmethod
    def shifted(cls, offset: float) -> Self:
        """A clock with a constant offset."""
        return cls((ClockSample(at=0.0, offset=offset, error=0.0),))

    def __call__(self, at: float) -> float:
        """The run's time at this time of the rank's clock."""
        after = bisect_right(self.moments, at, key=lambda moment: moment.at)
        if after == 0:
            return at + self.moments[0].offset
        before = self.moments[after - 1]
        if after == len(self.moments):
            return at + before.offset
        then = self.moments[after]
        passed, grown = then.at - before.at, then.offset - before.offset
        if abs(grown) > MAX_CLOCK_DRIFT_RATIO * passed + before.error + then.error:
            return at + before.offset
        return at + before.offset + grown * (at - before.at) / passed

    @property
    def error(self) -> float:
        """The typical error in seconds."""
        return median(moment.error for moment in self.moments)

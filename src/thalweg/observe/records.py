"""One step of one rank, by its own clock, and the other things that a rank writes down.

    begin      settled         first        last      averaged  optimized   end
      | waiting   | forward      | backward   | exposed  | optimizer | exposed |
        at the      and what is                 until                  until
        safe point  before it                   gradients              parameters
                                                are averaged           are

`begin` is where the step before ended. Plans that average gradients expose communication between
the last gradient and the averages, those that average parameters after the optimizer; what of an
exchange is in neither is hidden behind computing. Moments are seconds of `time.monotonic()`; a
`ClockSample` says what the run's common clock showed at one of them.

As JSON, a record is an object with its `kind`; `parsed` reads what `written` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

from thalweg.facts import grouped

RECORD_SECONDS_DIGITS = 6  # of seconds
RECORD_VERSION = 1


class BucketRecord(NamedTuple):
    """One exchange of one bucket: when it was ready, started and ended, and when each peer's first
    message arrived."""

    bucket: int
    ready: float
    started: float
    ended: float
    peers: Mapping[int, float]


class EncodeRecord(NamedTuple):
    """The time that a compressor spent on a bucket."""

    bucket: int
    began: float
    ended: float


class FlowRecord(NamedTuple):
    """The bytes that a rank's host sent to another in a step, by the kernel's counters. `busy` are
    the seconds with data in flight that the peer had room for."""

    peer: int  # the first rank there
    nbytes: int
    busy: float

    @property
    def rate(self) -> float:
        """The rate in bytes per second."""
        return self.nbytes / max(self.busy, 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """The first record of a rank, of each membership epoch and of each file."""

    kind: ClassVar[str] = "run"
    rank: int
    size: int
    host: str
    rack: str
    members: tuple[int, ...]
    sync: str
    at: float
    thalweg: str
    version: int = RECORD_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSample:
    """One measurement of the clock: at `at` of this rank's clock, the run's common clock was ahead
    by `offset`, give or take `error`."""

    kind: ClassVar[str] = "clock"
    at: float
    offset: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """An event: a `topic` such as `plan`, `late`, `hang`, `incident`, and a line."""

    kind: ClassVar[str] = "note"
    at: float
    step: int
    topic: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    kind: ClassVar[str] = "step"
    step: int
    begin: float
    settled: float  # seconds
    first: float
    last: float
    averaged: float
    optimized: float
    end: float
    rounds: tuple[BucketRecord, ...] = ()
    encodings: tuple[EncodeRecord, ...] = ()
    flows: tuple[FlowRecord, ...] = ()
    store: float = 0.0  # seconds of a round trip to the store; 0 if it isn't known

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def computing(self) -> float:
        """The compute time in seconds, without waiting for other ranks."""
        return self.last - self.begin - self.settled + self.optimized - self.averaged

    @property
    def exposed(self) -> float:
        """The exposed communication in seconds."""
        return self.averaged - self.last + self.end - self.optimized

    @property
    def exchanging(self) -> float:
        """The seconds with an exchange in flight; with torch's collectives, which don't report it,
        the seconds with a busy connection, or else the exposed communication."""
        spans = [(record.started, record.ended) for record in self.rounds]
        busy = max((flow.busy for flow in self.flows), default=0.0)
        return covered(spans) if spans else max(busy, self.exposed)

    @property
    def hidden(self) -> float:
        return max(0.0, self.exchanging - self.exposed)


class StepReport(NamedTuple):
    """The report of a rank on one step to the first member."""

    step: int
    seconds: float
    computing: float
    exposed: float
    store: float
    flows: tuple[FlowRecord, ...]

    @classmethod
    def of(cls, step: StepRecord) -> Self:
        return cls(step.step, step.seconds, step.computing, step.exposed, step.store, step.flows)

    @classmethod
    def read(cls, entries: Sequence[Any]) -> Self:
        step, seconds, computing, exposed, store, flows = entries
        seen = tuple(FlowRecord(*flow) for flow in flows)
        return cls(step, seconds, computing, exposed, store, seen)


Record = RunHeader | ClockSample | EventRecord | StepRecord


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The total length of the union of these intervals, in seconds."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def by_step(ranks: Mapping[int, Iterable[StepRecord]]) -> dict[int, dict[int, StepRecord]]:
    """The records by step, then by rank."""
    records = grouped((s.step, (rank, s)) for rank, steps in ranks.items() for s in steps)
    return {step: dict(of_ranks) for step, of_ranks in sorted(records.items())}


def written(record: Record) -> str:
    """The record as a JSON line, without its end."""
    if isinstance(record, StepRecord):  # there are many
        data = {entry.name: rounded(getattr(record, entry.name)) for entry in fields(record)}
    else:
        data = asdict(record)
    return json.dumps({"kind": record.kind, **data}, separators=(",", ":"))


def parsed(line: str) -> Record | None:
    """The record in a line; None if this version doesn't know its kind, ValueError if it is
    none."""
    data = json.loads(line)
    if not isinstance(data, dict):
        raise ValueError("a record is an object")
    kind = data.pop("kind", None)
    try:
        match kind:
            case StepRecord.kind:
                return _step(data)
            case RunHeader.kind:
                return RunHeader(**{**data, "members": tuple(data["members"])})
            case ClockSample.kind:
                return ClockSample(**data)
            case EventRecord.kind:
                return EventRecord(**data)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"a record of kind {kind}: {error}") from None
    return None


def rounded(value: Any) -> Any:
    """The value in its compact form: times are rounded to microseconds, parts have no names."""
    match value:
        case float():
            return round(value, RECORD_SECONDS_DIGITS)
        case dict():
            return {key: rounded(item) for key, item in value.items()}
        case tuple():
            return [rounded(item) for item in value]
    return value


def _step(data: dict[str, Any]) -> StepRecord:
    rounds = (
        BucketRecord(bucket, ready, started, ended, {int(p): came for p, came in peers.items()})
        for bucket, ready, started, ended, peers in data.pop("rounds")
    )
    encodings = (EncodeRecord(*values) for values in data.pop("encodings"))
    flows = (FlowRecord(*values) for values in data.pop("flows"))
    return StepRecord(**data, rounds=tuple(rounds), encodings=tuple(encodings), flows=tuple(flows))

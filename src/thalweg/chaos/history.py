"""The history of a run: records in the order in which they arrived, one line of JSON each.

Ranks record every step that they commit and every change of members; the fault injector records its
faults. Times are those of `time.time()`, which all processes of one machine share.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TextIO, TypeVar, get_args

from thalweg.chaos.fault import Fault

MAX_RECORDS = 2_000_000  # further records are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """A record that a rank reports."""

    time: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord(RankRecord):
    """A record of a rank's process after a step."""

    life: int  # restarts of its process so far
    step: int  # number of steps including this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(ProcessRecord):
    """A rank has finished a step. The sums are of the parameters, weighted with fixed signs, before
    and after averaging; they are equal under plans that don't average parameters."""

    formation: int  # membership epoch
    began_in: int  # membership epoch in which the step's samples were read
    members: tuple[int, ...]
    digest: str  # of all parameters
    samples: int  # that this rank read
    checksum: int  # of these samples; checksums of ranks add up
    process: int = 0  # process id
    interrupted: bool = False  # a rendezvous interrupted the averaging, which isn't repeated
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    counted: tuple[float, ...] = ()  # gradient counters among the parameters, by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(RankRecord):
    """A rank is about to send the gradient of the step after `step`, under plans that count."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(ProcessRecord):
    """A rank has noticed that members left or joined; `time` is when it could continue."""

    noticed: float
    formation: int
    left: tuple[int, ...]
    joined: tuple[int, ...]
    lost: int = 0  # samples
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    """A point in the course of the fault with this number."""

    time: float
    fault: int


class Struck(FaultRecord):
    """The fault begins at this time."""


class Healed(FaultRecord):
    """The fault has ended at this time."""


class Recovered(FaultRecord):
    """All ranks train together again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A checkpoint couldn't be written, or was rejected as damaged, with this error."""

    time: float
    rank: int | None = None
    fault: int | None = None  # that damaged the checkpoint, if the injector read it
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(RankRecord):
    """A checkpoint was written after this step."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Starved(RankRecord):
    """A rank's process got no processor time for these seconds until `time`, and no fault had
    paused it."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(ProcessRecord):
    """A rank has finished the run."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The run has failed with an error."""

    time: float
    reason: str


Record = (
    Commit | Sent | Named | Struck | Healed | Recovered | Refused | Saved | Starved | Ended | Lost
)
R = TypeVar("R")
_TYPES: dict[str, type[Record]] = {kind.__name__.lower(): kind for kind in get_args(Record)}


class History:
    """The faults and at most `MAX_RECORDS` records of a run, also written to `file` if given."""

    def __init__(self, faults: Iterable[Fault] = (), file: TextIO | None = None) -> None:
        self.faults = tuple(faults)
        self.events: list[Record] = []
        self._by_type: dict[type[Any], list[Any]] = defaultdict(list)
        self.commits: list[Commit] = self.of(Commit)
        self.named: list[Named] = self.of(Named)
        self.is_full = False
        self._file = file
        if file is not None:
            for fault in self.faults:
                file.write(json.dumps({"event": "fault", **asdict(fault)}) + "\n")

    def add(self, record: Record) -> None:
        if len(self.events) >= MAX_RECORDS:
            self.is_full = True
            return
        self.events.append(record)
        self.of(type(record)).append(record)
        if self._file is not None:
            self._file.write(json.dumps(as_dict(record)) + "\n")

    def of(self, kind: type[R]) -> list[R]:
        """The records of this type so far."""
        return self._by_type[kind]

    def successive(self) -> Iterator[tuple[Commit | None, Commit]]:
        """Each commit with the previous commit of the same process."""
        last: dict[tuple[int, int], Commit] = {}
        for commit in self.commits:
            yield last.get((commit.rank, commit.life)), commit
            last[commit.rank, commit.life] = commit

    def came_in(self, before: Commit, after: Commit) -> bool:
        """True if the rank joined, with another rank's state, between two of its commits."""
        return before.formation < after.formation and any(
            before.formation < record.formation <= after.formation and after.rank in record.joined
            for record in self.named
        )

    def time_of(self, kind: type[FaultRecord], fault: int) -> float | None:
        """The time at which a fault began, ended or was recovered from, if it did."""
        return next((record.time for record in self.of(kind) if record.fault == fault), None)


def as_dict(record: Record) -> dict[str, Any]:
    return {"event": type(record).__name__.lower(), **asdict(record)}


def of_dict(data: dict[str, Any]) -> Record:
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in data.items()
        if key != "event"
    }
    return _TYPES[data["event"]](**values)


Problem = str | tuple[str, int | None]
"""What a check finds: a text, and the number of the fault before it if that is known."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that a run has broken, and the number of the fault before it, if known."""

    check: str
    text: str
    fault: int | None = None

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"

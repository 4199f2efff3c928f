"""What happened, in the order in which it was heard of: a line of JSON each.

Ranks tell of every step they commit, and of whom they found gone; the nemesis tells of what it did.
Moments are those of `time.time()`, which all processes of one machine share.

What was not as promised, a check says in a `Violation`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, TextIO, get_args

from thalweg.chaos.fault import Fault

MAX_EVENTS = 2_000_000  # events that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A rank has taken a step. Sums are of the parameters, weighed with fixed signs: before and
    after averaging under a plan that averages parameters, and equal under others."""

    time: float
    rank: int
    life: int  # how often its process was started before
    step: int  # how many there are with it
    formation: int
    began_in: int  # the formation when the step's samples were taken
    members: tuple[int, ...]
    digest: str  # of all parameters
    samples: int  # that this rank took
    checksum: int  # of which they are: adds up over ranks
    process: int = 0  # its number
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    counted: tuple[float, ...] = ()  # what counters among the parameters say, by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A rank is about to send the gradient of the step that follows `step`; told where gradients
    are counted."""

    time: float
    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A rank has noticed who left or came."""

    time: float  # it could go on
    noticed: float
    rank: int
    life: int
    step: int
    formation: int
    left: tuple[int, ...]
    joined: tuple[int, ...]
    lost: int = 0  # samples
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    time: float
    fault: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    time: float
    fault: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """All ranks train together again."""

    time: float
    fault: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A checkpoint could not be written, or was found damaged, and that was told."""

    time: float
    rank: int | None = None
    fault: int | None = None  # by which it was damaged, and looked at from outside
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    time: float
    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Starved:
    """A rank's process didn't get to run for so long, though nobody had stopped it on purpose."""

    time: float  # when it ran again
    rank: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A rank has come to the end of the run."""

    time: float
    rank: int
    life: int
    step: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The run itself has ended before its time."""

    time: float
    reason: str


Event = (
    Commit | Sent | Named | Struck | Healed | Recovered | Refused | Saved | Starved | Ended | Lost
)
_TYPES: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Event)}


class History:
    """In memory, and in a file if one is named; after `MOST` events nothing more is taken in."""

    def __init__(self, faults: Iterable[Fault] = (), file: TextIO | None = None) -> None:
        self.faults = tuple(faults)
        self.events: list[Event] = []
        self.commits: list[Commit] = []
        self.named: list[Named] = []
        self.is_full = False
        self._moments: dict[tuple[type[Any], int], float] = {}
        self._joined: set[tuple[int, int]] = set()  # formations, and ranks that came in with them
        self._file = file
        if file is not None:
            for fault in self.faults:
                file.write(json.dumps({"event": "fault", **asdict(fault)}) + "\n")

    def add(self, event: Event) -> None:
        if len(self.events) >= MAX_EVENTS:
            self.is_full = True
            return
        self.events.append(event)
        if isinstance(event, Commit):
            self.commits.append(event)
        elif isinstance(event, Named):
            self.named.append(event)
            self._joined |= {(event.formation, rank) for rank in event.joined}
        elif isinstance(event, Struck | Healed | Recovered):
            self._moments.setdefault((type(event), event.fault), event.time)
        if self._file is not None:
            self._file.write(json.dumps(as_dict(event)) + "\n")

    def of(self, kind: type[Any]) -> Iterator[Any]:
        return (event for event in self.events if isinstance(event, kind))

    def successive(self) -> Iterator[tuple[Commit | None, Commit]]:
        """Every commit, after the one that the same process made before it."""
        last: dict[tuple[int, int], Commit] = {}
        for commit in self.commits:
            yield last.get((commit.rank, commit.life)), commit
            last[commit.rank, commit.life] = commit

    def came_in(self, before: Commit, after: Commit) -> bool:
        """Whether a rank took over another's state between two of its commits."""
        formations = range(before.formation + 1, after.formation + 1)
        return any((formation, after.rank) in self._joined for formation in formations)

    def moment(self, kind: type[Any], fault: int) -> float | None:
        """When this fault came to that point."""
        return self._moments.get((kind, fault))


def as_dict(event: Event) -> dict[str, Any]:
    return {"event": type(event).__name__.lower(), **asdict(event)}


def of_dict(data: dict[str, Any]) -> Event:
    kind = _TYPES[data["event"]]
    values = {field.name: data[field.name] for field in fields(kind)}
    made: Event = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    return made


@dataclass(frozen=True, slots=True)
class Violation:
    """`fault` is the number of the one that it follows, if that is known."""

    check: str
    text: str
    fault: int | None = None

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"

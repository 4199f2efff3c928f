"""Who trains together. The members of a run are numbered formations: the first is everybody, and
whenever somebody dies or comes back the living agree on the next (`membership.py`).

Where each of them stands is written down with it. All else follows from that, the same on all
ranks: who is furthest, whose state those take who are behind or new, and so which step is redone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import inf


class Doing(StrEnum):
    STEP = "step"
    SAFE_POINT = "safe point"
    WORK = "work"  # that all do together, between a step and the next safe point


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a rank is when it comes to a muster."""

    step: int = 0
    works: int = 0  # that all have done together since the last step: averages, checkpoints
    doing: Doing = Doing.STEP
    joins: bool = False  # it holds nothing that counts, and needs another's state
    keeps: bool = False  # what it holds counts though others are further: replicas differ
    stops: bool = False  # all have agreed to stop at this step
    plan: str = ""
    version: int = 0  # of its parameters, where only one rank has the newest
    lost: tuple[int, ...] = ()  # its connections to these broke
    awaits: tuple[int, ...] = ()  # these it waited for in vain
    why: str = ""  # what made it come, if it knows

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.works

    @property
    def is_alone(self) -> bool:
        """Whether it has taken the step that it is at, and met nobody after that."""
        return self.keeps and self.doing is Doing.STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """`left` are members of the one before that aren't in this one, with the reason of each."""

    number: int
    members: tuple[int, ...]
    standings: Mapping[int, Standing] = field(default_factory=dict)
    left: Mapping[int, str] = field(default_factory=dict)
    tries: int = 1  # formations in a row that got nowhere, and this one
    broken: tuple[tuple[int, int], ...] = ()  # connections of theirs: from whom, to whom
    problem: str = ""  # why they can't go on at all

    @classmethod
    def first(cls, size: int) -> Formation:
        ranks = tuple(range(size))
        return cls(number=1, members=ranks, standings={rank: Standing() for rank in ranks})

    @property
    def joined(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if self.standings[rank].joins)

    @property
    def place(self) -> tuple[int, int]:
        """How far the furthest are: where all go on."""
        return max(s.place for s in self._holders.values())

    @property
    def source(self) -> int:
        """Who has the newest parameters, where only one has; else the first of the furthest."""
        first = self._first
        return max(self._holders, key=lambda rank: (self.standings[rank].version, rank == first))

    @property
    def root(self) -> int | None:
        """The source, if only it has the newest parameters."""
        return self.source if self.standings[self.source].version else None

    @property
    def begins(self) -> int:
        """The first step that all take together: not that which one has taken alone."""
        return self.place[0] + self.standings[self._first].is_alone

    @property
    def start(self) -> tuple[int, int]:
        """Where they begin together. Who comes from there has got nowhere."""
        return max(self.place, (self.begins, 0))

    @property
    def takers(self) -> tuple[int, ...]:
        """Who takes over the source's state: those who join, and those who are behind."""
        place = self.place
        return tuple(
            rank
            for rank in self.members
            for standing in (self.standings[rank],)
            if standing.joins or (standing.place < place and not standing.keeps)
        )

    @property
    def stops_at(self) -> int | None:
        """The step at which those are to stop too who haven't reached it; None if none is known."""
        return min((s.step for s in self._holders.values() if s.stops), default=None)

    def missed(self, rank: int) -> float:
        """How many of the works that this rank comes to before its next safe point aren't its own
        any more. All, if it takes over the state of one that may be beyond them."""
        own, furthest = self.standings[rank], self.standings[self._first]
        if rank in self.takers:
            return 0 if own.doing is Doing.SAFE_POINT else inf
        if own.step < furthest.step or own.works == furthest.works:
            return 0
        return furthest.works - own.works - 1 if furthest.doing is Doing.WORK else inf

    def at_work(self, step: int) -> tuple[int, ...]:
        """The members that do the works before this step. If the furthest are at one, those who
        aren't don't come to it any more, or know nothing of it; where replicas differ that is so of
        those who join alone, who are at the step that all begin with."""
        place = self.place
        if any(standing.keeps for standing in self.standings.values()):
            return self.members if step > self.begins else self._but(self.joined)
        if step > place[0] or self.standings[self.source].doing is not Doing.WORK:
            return self.members
        return tuple(
            rank
            for rank, standing in sorted(self._holders.items())
            if standing.place == place and standing.doing is Doing.WORK
        )

    def _but(self, ranks: Collection[int]) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if rank not in ranks)

    @property
    def cause(self) -> str:
        """What happened, where nobody left or came."""
        reasons = (standing.why for standing in self.standings.values())
        return next((why for why in reasons if why), "members met anew")

    @property
    def plan(self) -> str:
        """The source's: others may not have taken it up yet."""
        return self.standings[self.source].plan

    @property
    def _first(self) -> int:
        """The first of those who are furthest, and of these one that has taken the step alone."""
        furthest = [rank for rank, s in self._holders.items() if s.place == self.place]
        return min(furthest, key=lambda rank: (not self.standings[rank].is_alone, rank))

    @property
    def _holders(self) -> dict[int, Standing]:
        return {r: self.standings[r] for r in self.members if not self.standings[r].joins}

    def text(self) -> str:
        return json.dumps(
            {
                "number": self.number,
                "members": self.members,
                "standings": {rank: asdict(s) for rank, s in self.standings.items()},
                "left": dict(self.left),
                "tries": self.tries,
                "broken": self.broken,
                "problem": self.problem,
            }
        )

    @classmethod
    def of_text(cls, text: str | bytes) -> Formation:
        data = json.loads(text)
        return cls(
            number=data["number"],
            members=tuple(data["members"]),
            standings={int(rank): standing_of(s) for rank, s in data["standings"].items()},
            left={int(rank): reason for rank, reason in data["left"].items()},
            tries=data["tries"],
            broken=tuple((source, target) for source, target in data["broken"]),
            problem=data["problem"],
        )


def standing_of(data: Mapping[str, object]) -> Standing:
    lost, awaits = data["lost"], data["awaits"]
    assert isinstance(lost, list)
    assert isinstance(awaits, list)
    return Standing(
        step=int(str(data["step"])),
        works=int(str(data["works"])),
        doing=Doing(str(data["doing"])),
        joins=bool(data["joins"]),
        keeps=bool(data["keeps"]),
        stops=bool(data["stops"]),
        plan=str(data["plan"]),
        version=int(str(data["version"])),
        lost=tuple(int(rank) for rank in lost),
        awaits=tuple(int(rank) for rank in awaits),
        why=str(data["why"]),
    )


def is_enough(members: int, before: int) -> bool:
    """At least half of the members before. Two halves can't both go on: the store takes one."""
    return 2 * members >= before

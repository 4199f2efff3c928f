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


class MemberPhase(StrEnum):
    STEP = "step"
    SAFE_POINT = "safe point"
    COLLECTIVE = "work"  # that all do together, between a step and the next safe point


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """Where a rank is when it comes to a muster."""

    step: int = 0
    works: int = 0  # that all have done together since the last step: averages, checkpoints
    doing: MemberPhase = MemberPhase.STEP
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
        return self.keeps and self.doing is MemberPhase.STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipEpoch:
    """`left` are members of the one before that aren't in this one, with the reason of each."""

    number: int
    members: tuple[int, ...]
    statuses: Mapping[int, MemberStatus] = field(default_factory=dict)
    left: Mapping[int, str] = field(default_factory=dict)
    tries: int = 1  # formations in a row that got nowhere, and this one
    broken_connections: tuple[
        tuple[int, int], ...
    ] = ()  # connections of theirs: from whom, to whom
    problem: str = ""  # why they can't go on at all

    @classmethod
    def first(cls, size: int) -> MembershipEpoch:
        ranks = tuple(range(size))
        return cls(number=1, members=ranks, statuses={rank: MemberStatus() for rank in ranks})

    @property
    def joined(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if self.statuses[rank].joins)

    @property
    def place(self) -> tuple[int, int]:
        """How far the furthest are: where all go on."""
        return max(s.place for s in self._holders.values())

    @property
    def donor(self) -> int:
        """Who has the newest parameters, where only one has; else the first of the furthest."""
        first = self._first
        return max(self._holders, key=lambda rank: (self.statuses[rank].version, rank == first))

    @property
    def root(self) -> int | None:
        """The source, if only it has the newest parameters."""
        return self.donor if self.statuses[self.donor].version else None

    @property
    def first_step(self) -> int:
        """The first step that all take together: not that which one has taken alone."""
        return self.place[0] + self.statuses[self._first].is_alone

    @property
    def start(self) -> tuple[int, int]:
        """Where they begin together. Who comes from there has got nowhere."""
        return max(self.place, (self.first_step, 0))

    @property
    def recipients(self) -> tuple[int, ...]:
        """Who takes over the source's state: those who join, and those who are behind."""
        place = self.place
        return tuple(
            rank
            for rank in self.members
            for status in (self.statuses[rank],)
            if status.joins or (status.place < place and not status.keeps)
        )

    @property
    def stops_at(self) -> int | None:
        """The step at which those are to stop too who haven't reached it; None if none is known."""
        return min((s.step for s in self._holders.values() if s.stops), default=None)

    def collectives_to_skip(self, rank: int) -> float:
        """How many of the works that this rank comes to before its next safe point aren't its own
        any more. All, if it takes over the state of one that may be beyond them."""
        own, furthest = self.statuses[rank], self.statuses[self._first]
        if rank in self.recipients:
            return 0 if own.doing is MemberPhase.SAFE_POINT else inf
        if own.step < furthest.step or own.works == furthest.works:
            return 0
        return furthest.works - own.works - 1 if furthest.doing is MemberPhase.COLLECTIVE else inf

    def collective_members(self, step: int) -> tuple[int, ...]:
        """The members that do the works before this step. If the furthest are at one, those who
        aren't don't come to it any more, or know nothing of it; where replicas differ that is so of
        those who join alone, who are at the step that all begin with."""
        place = self.place
        if any(status.keeps for status in self.statuses.values()):
            return self.members if step > self.first_step else self._but(self.joined)
        if step > place[0] or self.statuses[self.donor].doing is not MemberPhase.COLLECTIVE:
            return self.members
        return tuple(
            rank
            for rank, status in sorted(self._holders.items())
            if status.place == place and status.doing is MemberPhase.COLLECTIVE
        )

    def _but(self, ranks: Collection[int]) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if rank not in ranks)

    @property
    def cause(self) -> str:
        """What happened, where nobody left or came."""
        reasons = (status.why for status in self.statuses.values())
        return next((why for why in reasons if why), "members met anew")

    @property
    def plan(self) -> str:
        """The source's: others may not have taken it up yet."""
        return self.statuses[self.donor].plan

    @property
    def _first(self) -> int:
        """The first of those who are furthest, and of these one that has taken the step alone."""
        furthest = [rank for rank, s in self._holders.items() if s.place == self.place]
        return min(furthest, key=lambda rank: (not self.statuses[rank].is_alone, rank))

    @property
    def _holders(self) -> dict[int, MemberStatus]:
        return {r: self.statuses[r] for r in self.members if not self.statuses[r].joins}

    def text(self) -> str:
        return json.dumps(
            {
                "number": self.number,
                "members": self.members,
                "standings": {rank: asdict(s) for rank, s in self.statuses.items()},
                "left": dict(self.left),
                "tries": self.tries,
                "broken": self.broken_connections,
                "problem": self.problem,
            }
        )

    @classmethod
    def of_text(cls, text: str | bytes) -> MembershipEpoch:
        data = json.loads(text)
        return cls(
            number=data["number"],
            members=tuple(data["members"]),
            statuses={int(rank): member_status_of(s) for rank, s in data["standings"].items()},
            left={int(rank): reason for rank, reason in data["left"].items()},
            tries=data["tries"],
            broken_connections=tuple((source, target) for source, target in data["broken"]),
            problem=data["problem"],
        )


def member_status_of(data: Mapping[str, object]) -> MemberStatus:
    lost, awaits = data["lost"], data["awaits"]
    assert isinstance(lost, list)
    assert isinstance(awaits, list)
    return MemberStatus(
        step=int(str(data["step"])),
        works=int(str(data["works"])),
        doing=MemberPhase(str(data["doing"])),
        joins=bool(data["joins"]),
        keeps=bool(data["keeps"]),
        stops=bool(data["stops"]),
        plan=str(data["plan"]),
        version=int(str(data["version"])),
        lost=tuple(int(rank) for rank in lost),
        awaits=tuple(int(rank) for rank in awaits),
        why=str(data["why"]),
    )


def has_quorum(members: int, before: int) -> bool:
    """At least half of the members before. Two halves can't both go on: the store takes one."""
    return 2 * members >= before

"""Membership epochs: the numbered sets of ranks that train together. The first has all ranks; when
a rank fails or joins, the others agree on the next epoch (`membership.py`).

An epoch includes the status of each member. Everything else follows from these, equally on all
ranks: which members are the most advanced, which one donates its state to those that are behind or
new, and so which step is repeated.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import inf
from typing import Any

from thalweg.errors import ranks_text

FINISHED_REASON, RESTARTED_REASON = "finished", "restarted"


class MemberPhase(StrEnum):
    STEP = "step"
    SAFE_POINT = "safe point"
    COLLECTIVE = "work"  # between a step and the next safe point


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """The status with which a rank comes to a rendezvous."""

    step: int = 0
    works: int = 0  # collectives completed since the last step: averages, checkpoints
    doing: MemberPhase = MemberPhase.STEP
    joins: bool = False  # it has no valid state and needs another member's
    keeps: bool = False  # its state stays valid though others are ahead: replicas differ
    stops: bool = False  # all have agreed to stop at this step
    plan: str = ""
    version: int = 0  # of its parameters, if only one rank has the newest
    lost: tuple[int, ...] = ()  # peers of its broken connections
    awaits: tuple[int, ...] = ()  # peers that it timed out waiting for
    why: str = ""  # the reason for the rendezvous, if this rank has one

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.works

    @property
    def is_alone(self) -> bool:
        """True if it has taken its current step and averaged with no other rank since."""
        return self.keeps and self.doing is MemberPhase.STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipEpoch:
    """One membership epoch. `left` are the previous epoch's members that aren't in this one, with
    the reason of each."""

    number: int
    members: tuple[int, ...]
    statuses: Mapping[int, MemberStatus] = field(default_factory=dict)
    left: Mapping[int, str] = field(default_factory=dict)
    tries: int = 1  # epochs in a row without progress, and this one
    broken_connections: tuple[tuple[int, int], ...] = ()  # in those epochs: sender, receiver
    problem: str = ""  # an error that ends the run

    @classmethod
    def first(cls, size: int) -> MembershipEpoch:
        ranks = tuple(range(size))
        return cls(number=1, members=ranks, statuses={rank: MemberStatus() for rank in ranks})

    @property
    def joined(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if self.statuses[rank].joins)

    @property
    def place(self) -> tuple[int, int]:
        """The step and collective of the most advanced members, where all resume."""
        return max(s.place for s in self._holders.values())

    @property
    def donor(self) -> int:
        """The only member with the newest parameters, or else the first of the most advanced."""
        first = self._first
        return max(self._holders, key=lambda rank: (self.statuses[rank].version, rank == first))

    @property
    def root(self) -> int | None:
        """The donor, if only it has the newest parameters."""
        return self.donor if self.statuses[self.donor].version else None

    @property
    def first_step(self) -> int:
        """The first step that all members take, after one that a member has taken alone."""
        return self.place[0] + self.statuses[self._first].is_alone

    @property
    def start(self) -> tuple[int, int]:
        """The place at which the epoch begins; a member that is still there made no progress."""
        return max(self.place, (self.first_step, 0))

    @property
    def recipients(self) -> tuple[int, ...]:
        """The members that load the donor's state: those that join or are behind."""
        place = self.place
        return tuple(
            rank
            for rank in self.members
            for status in (self.statuses[rank],)
            if status.joins or (status.place < place and not status.keeps)
        )

    @property
    def stops_at(self) -> int | None:
        """The step at which members that haven't reached it stop too; None without such a step."""
        return min((s.step for s in self._holders.values() if s.stops), default=None)

    def collectives_to_skip(self, rank: int) -> float:
        """The number of collectives before this rank's next safe point that the others completed
        without it. All, if it loads the state of a member that may be beyond them."""
        own, first = self.statuses[rank], self.statuses[self._first]
        if rank in self.recipients:
            return 0 if own.doing is MemberPhase.SAFE_POINT else inf
        if own.step < first.step or own.works == first.works:
            return 0
        return first.works - own.works - 1 if first.doing is MemberPhase.COLLECTIVE else inf

    def collective_members(self, step: int) -> tuple[int, ...]:
        """The members that take part in the collectives before this step. If the most advanced
        members are in a collective, only the members in it take part; if replicas differ, all but
        those that join."""
        place = self.place
        if any(status.keeps for status in self.statuses.values()):
            joined = () if step > self.first_step else self.joined
            return tuple(rank for rank in self.members if rank not in joined)
        if step > place[0] or self.statuses[self.donor].doing is not MemberPhase.COLLECTIVE:
            return self.members
        return tuple(
            rank
            for rank, status in sorted(self._holders.items())
            if status.place == place and status.doing is MemberPhase.COLLECTIVE
        )

    @property
    def cause(self) -> str:
        """The reason for the rendezvous if no member left or joined."""
        reasons = filter(None, (status.why for status in self.statuses.values()))
        return next(reasons, "the members met in a rendezvous")

    @property
    def plan(self) -> str:
        """The donor's plan: other members may not have switched to it yet."""
        return self.statuses[self.donor].plan

    @property
    def _first(self) -> int:
        """The first of the most advanced members, preferably one that has taken a step alone."""
        advanced = [rank for rank, s in self._holders.items() if s.place == self.place]
        return min(advanced, key=lambda rank: (not self.statuses[rank].is_alone, rank))

    @property
    def _holders(self) -> dict[int, MemberStatus]:
        return {r: self.statuses[r] for r in self.members if not self.statuses[r].joins}

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str | bytes) -> MembershipEpoch:
        data = json.loads(text)
        statuses = {int(rank): member_status_of(s) for rank, s in data["statuses"].items()}
        read = {
            "members": tuple(data["members"]),
            "statuses": statuses,
            "left": {int(rank): reason for rank, reason in data["left"].items()},
            "broken_connections": tuple(map(tuple, data["broken_connections"])),
        }
        return cls(**{**data, **read})


def member_status_of(data: Mapping[str, Any]) -> MemberStatus:
    """The status in the fields that `asdict` made and JSON carried."""
    sequences = {name: tuple(data[name]) for name in ("lost", "awaits")}
    return MemberStatus(**{**data, **sequences, "doing": MemberPhase(data["doing"])})


def has_quorum(members: int, before: int) -> bool:
    """True for at least half of the previous members. Of two halves the store accepts one."""
    return 2 * members >= before


def member_to_evict(
    broken: Collection[tuple[int, int]], statuses: Mapping[int, MemberStatus]
) -> tuple[int | None, str]:
    """The member to evict when epochs make no progress though no member has failed: several in a
    row are interrupted at the same place. If the members run different collectives, the mismatch to
    report instead. Broken connections come first: they also cause mismatches."""
    evicted = most_involved(broken, statuses)
    if evicted is not None:
        return evicted, ""
    problem = collective_mismatch(statuses)
    return (None, problem) if problem else (most_awaited(statuses), "")


def most_involved(broken: Collection[tuple[int, int]], members: Collection[int]) -> int | None:
    """The member with the most partners in broken connections, including partners that have left;
    among equals it is a sender. None if no connection of a member broke.

    A connection that breaks has two ends, and only the sending one notices. If a rank's messages
    never arrive, or arrive damaged, it loses its connections to one peer after the other; if no
    message reaches a rank, one peer after the other loses its connection to that rank."""
    partners = {r: {p for pair in broken if r in pair for p in pair} - {r} for r in members}
    sends = {rank: {pair for pair in broken if pair[0] == rank} for rank in members}
    involved = [rank for rank in members if partners[rank]]
    return max(involved, key=lambda r: (len(partners[r]), len(sends[r]), r), default=None)


def most_awaited(statuses: Mapping[int, MemberStatus]) -> int | None:
    """The member that most others timed out waiting for, the highest of equals; None without a
    timeout."""
    votes = [rank for status in statuses.values() for rank in status.awaits if rank in statuses]
    return max(votes, key=lambda rank: (votes.count(rank), rank), default=None)


def collective_mismatch(statuses: Mapping[int, MemberStatus]) -> str:
    """The mismatch if only some members are in a collective between two steps; empty otherwise."""
    inside = [rank for rank in sorted(statuses) if statuses[rank].doing is MemberPhase.COLLECTIVE]
    others = [rank for rank in sorted(statuses) if rank not in inside]
    if not inside or not others:
        return ""
    step = max(status.step for status in statuses.values())
    return (
        f"{ranks_text(inside)} wait in a collective before step {step}, but {ranks_text(others)} "
        "in the step itself"
    )


def departure_text(rank: int, reason: str) -> str:
    """A clause for a log line: why this rank isn't in the epoch any more."""
    if reason in (FINISHED_REASON, RESTARTED_REASON):
        return f"rank {rank} {reason}"
    return f"rank {rank} failed ({reason})"

"""The choice of a member to evict when epochs make no progress though no member has failed: several
in a row are interrupted at the same place. If the members run different collectives, none is
evicted, and the mismatch is reported.

A connection that breaks has two ends, and only the sending one notices. If a rank's messages never
arrive, or arrive damaged, it loses its connections to one peer after the other; if no message
reaches a rank, one peer after the other loses its connection to that rank. So the rank to evict has
the most partners in broken connections, over all epochs that began at the same place; among equals,
it is a sender.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from thalweg.errors import ranks_text
from thalweg.members.membership_epoch import MemberPhase, MemberStatus

BrokenConnections = Collection[tuple[int, int]]
"""Connections as (sender, receiver)."""


def member_to_evict(
    broken: BrokenConnections, statuses: Mapping[int, MemberStatus]
) -> tuple[int | None, str]:
    """The member to evict, or else the mismatch to report. Broken connections come first: they also
    cause mismatches."""
    evicted = most_involved(broken, statuses)
    if evicted is not None:
        return evicted, ""
    problem = collective_mismatch(statuses)
    return (None, problem) if problem else (most_awaited(statuses), "")


def most_involved(broken: BrokenConnections, members: Collection[int]) -> int | None:
    """The member with the most partners in broken connections, including partners that have left;
    None if no connection of a member broke."""
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

"""Members that don't get on though none of them is gone: formation after formation breaks off at
the same place. Then one is left out, or all are told what they do differently.

A connection that breaks has two ends, and only who sends on it notices. If what a rank sends never
arrives, or arrives damaged, it will lose its connections to one peer after the other; if nothing
gets through to a rank, one peer after the other will lose theirs to it. So it is the rank with most
partners in broken connections, over all formations that began at the same place; of equals one that
sends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from thalweg.errors import ranks_text
from thalweg.members.membership_epoch import MemberPhase, MemberStatus

BrokenConnections = Collection[tuple[int, int]]
"""Connections: from whom, to whom."""


def member_to_evict(
    broken: BrokenConnections, statuses: Mapping[int, MemberStatus]
) -> tuple[int | None, str]:
    """Who is left out, or else what they do differently. Connections tell first: where some of them
    break, members are at odds because of that."""
    culprit = most_involved(broken, statuses)
    if culprit is not None:
        return culprit, ""
    problem = collective_mismatch(statuses)
    return (None, problem) if problem else (most_awaited(statuses), "")


def most_involved(broken: BrokenConnections, members: Collection[int]) -> int | None:
    """The member with most partners in connections that broke, among them those who have left;
    None if it is about none."""
    partners = {r: {p for pair in broken if r in pair for p in pair} - {r} for r in members}
    sends = {rank: {pair for pair in broken if pair[0] == rank} for rank in members}
    involved = [rank for rank in members if partners[rank]]
    return max(involved, key=lambda r: (len(partners[r]), len(sends[r]), r), default=None)


def most_awaited(statuses: Mapping[int, MemberStatus]) -> int | None:
    """Whom most of the others waited for in vain, the highest of equals; None if nobody did."""
    votes = [rank for status in statuses.values() for rank in status.awaits]
    accused = [rank for rank in votes if rank in statuses]
    return max(accused, key=lambda rank: (accused.count(rank), rank), default=None)


def collective_mismatch(statuses: Mapping[int, MemberStatus]) -> str:
    """What they wait for, if some want to share something between two steps and the others don't;
    an empty text if that isn't it."""
    working = [rank for rank in sorted(statuses) if statuses[rank].doing is MemberPhase.COLLECTIVE]
    others = [rank for rank in sorted(statuses) if rank not in working]
    if not working or not others:
        return ""
    step = max(status.step for status in statuses.values())
    return (
        f"{ranks_text(working)} wait before step {step} to share something, and "
        f"{ranks_text(others)} in it"
    )

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
from thalweg.members.membership_epoch import Doing, Standing

Broken = Collection[tuple[int, int]]
"""Connections: from whom, to whom."""


def who_or_what(broken: Broken, standings: Mapping[int, Standing]) -> tuple[int | None, str]:
    """Who is left out, or else what they do differently. Connections tell first: where some of them
    break, members are at odds because of that."""
    culprit = most_involved(broken, standings)
    if culprit is not None:
        return culprit, ""
    problem = at_odds(standings)
    return (None, problem) if problem else (most_awaited(standings), "")


def most_involved(broken: Broken, members: Collection[int]) -> int | None:
    """The member with most partners in connections that broke, among them those who have left;
    None if it is about none."""
    partners = {r: {p for pair in broken if r in pair for p in pair} - {r} for r in members}
    sends = {rank: {pair for pair in broken if pair[0] == rank} for rank in members}
    involved = [rank for rank in members if partners[rank]]
    return max(involved, key=lambda r: (len(partners[r]), len(sends[r]), r), default=None)


def most_awaited(standings: Mapping[int, Standing]) -> int | None:
    """Whom most of the others waited for in vain, the highest of equals; None if nobody did."""
    votes = [rank for standing in standings.values() for rank in standing.awaits]
    accused = [rank for rank in votes if rank in standings]
    return max(accused, key=lambda rank: (accused.count(rank), rank), default=None)


def at_odds(standings: Mapping[int, Standing]) -> str:
    """What they wait for, if some want to share something between two steps and the others don't;
    an empty text if that isn't it."""
    working = [rank for rank in sorted(standings) if standings[rank].doing is Doing.WORK]
    others = [rank for rank in sorted(standings) if rank not in working]
    if not working or not others:
        return ""
    step = max(standing.step for standing in standings.values())
    return (
        f"{ranks_text(working)} wait before step {step} to share something, and "
        f"{ranks_text(others)} in it"
    )

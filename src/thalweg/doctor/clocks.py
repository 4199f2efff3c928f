"""Clocks that differ between hosts: harmless to training, and logs then tell things in the wrong
order. (Traces align themselves.)"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.doctor.calling import OK, Call
from thalweg.doctor.facts import Facts, by_host
from thalweg.doctor.finding import Finding
from thalweg.facts import about

MOST = 0.1  # seconds


def skew(ranks: Sequence[Facts], calls: Sequence[Call]) -> list[Finding]:
    """Of every host's clock against that of the first rank's."""
    hosts = by_host(ranks)
    if len(hosts) < 2:
        return [Finding(check="clocks", verdict="ok", detail="all ranks are on one host")]
    first, *others = hosts.values()
    found = []
    largest = 0.0
    for there in others:
        best = _shortest(first, there, calls)
        if best is None:
            continue
        ahead, doubt = best
        largest = max(largest, abs(ahead) + doubt)
        if abs(ahead) - doubt > MOST:
            found.append(_off(there, first[0], ahead, doubt))
    within = f"within {about(largest, 's')} of {first[0].name}'s on all hosts that were reached"
    return found or [Finding(check="clocks", verdict="ok", detail=within)]


def _shortest(
    first: Sequence[Facts], there: Sequence[Facts], calls: Sequence[Call]
) -> tuple[float, float] | None:
    """How far `there` is ahead, and half of the shortest round trip, whoever called."""
    ours, theirs = ({facts.rank for facts in side} for side in (first, there))
    found = []
    for call in calls:
        if call.outcome == OK and {call.caller, call.peer} <= ours | theirs:
            if call.caller in ours and call.peer in theirs:
                found.append((call.trip, call.ahead))
            elif call.caller in theirs and call.peer in ours:
                found.append((call.trip, -call.ahead))
    if not found:
        return None
    trip, ahead = min(found)
    return ahead, trip / 2


def _off(there: Sequence[Facts], first: Facts, ahead: float, doubt: float) -> Finding:
    way = "ahead of" if ahead > 0 else "behind"
    return Finding(
        check="clocks",
        verdict="warn",
        detail=f"the clock is {about(abs(ahead), 's')} {way} {first.name}'s (give or take "
        f"{about(doubt, 's')}): logs of the two can't be put in order",
        remedy=f"run an NTP client (chrony, systemd-timesyncd) on {there[0].name}",
        ranks=tuple(facts.rank for facts in there),
        hosts=(there[0].name,),
    )

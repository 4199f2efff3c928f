"""How long a fault was felt: until it was told of, until the others went on, until all was well.

    struck     detected              went on           healed        back
      |------------|--------------------|-----------------|------------|
                   somebody names       end of the longest             every rank that was hit
                   who was hit          gap between steps              has taken a step again

Those who weren't hit may lose a moment: the longest time between two steps of one of them that the
fault falls into, counted from the fault, or that begins after it, when members meet anew.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from thalweg.chaos.fault import Fault
from thalweg.chaos.history import Healed, History, Named, Recovered, Struck
from thalweg.facts import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTimes:
    """Moments, and seconds; None where it didn't come to that. `detected` is since it came,
    `went_on` how long the others stood still, `back` is since it was healed."""

    fault: Fault
    hit: frozenset[int]
    injected: float
    healed: float | None
    recovered: float | None
    reports: tuple[Named, ...]  # who named somebody that was hit
    detected: float | None
    stall_seconds: float | None
    rejoin_seconds: float | None


def fault_times(history: History, cluster: Cluster) -> list[FaultTimes]:
    """Of every fault that came, in order."""
    times: dict[int, list[float]] = defaultdict(list)
    for commit in history.commits:
        times[commit.rank].append(commit.time)
    for of_rank in times.values():
        of_rank.sort()
    end = max((event.time for event in history.events), default=0.0)
    came = [f for f in history.faults if history.moment(Struck, f.number) is not None]
    spans = {f.number: _span(history, f, end) for f in came}
    return [
        _times_of(
            history,
            fault,
            fault.hits(cluster),
            times,
            end,
            {
                rank
                for other in came
                if _overlap(spans[other.number], spans[fault.number])
                for rank in other.hits(cluster)
            },
        )
        for fault in came
    ]


def _times_of(
    history: History,
    fault: Fault,
    hit: frozenset[int],
    times: dict[int, list[float]],
    end: float,
    out: set[int],
) -> FaultTimes:
    struck, over = _span(history, fault, end)
    healed = history.moment(Healed, fault.number)
    telling = [
        event
        for event in history.named
        if struck <= event.time  # what it noticed first may have been another one
        and event.noticed <= over
        and hit & {*event.left, *event.joined}
    ]
    detected = min((max(struck, event.noticed) for event in telling), default=None)
    gaps = [_gap(times[rank], struck, over) for rank in times if rank not in out]
    longest = max((gap for gap in gaps if gap), key=lambda gap: gap[1] - gap[0], default=None)
    since = struck if healed is None else healed
    returns = [_next(times[rank], since) for rank in hit]
    back = None if not returns or None in returns else max(t for t in returns if t) - since
    return FaultTimes(
        fault=fault,
        hit=hit,
        injected=struck,
        healed=healed,
        recovered=history.moment(Recovered, fault.number),
        reports=tuple(telling),
        detected=None if detected is None else detected - struck,
        stall_seconds=None if longest is None else longest[1] - max(longest[0], struck),
        rejoin_seconds=back,
    )


def _span(history: History, fault: Fault, end: float) -> tuple[float, float]:
    """From when it came until all was well again."""
    struck = history.moment(Struck, fault.number)
    recovered = history.moment(Recovered, fault.number)
    return struck or 0.0, end if recovered is None else recovered


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _gap(times: list[float], struck: float, over: float) -> tuple[float, float] | None:
    """The longest between two steps from then on, until all was well."""
    first = max(0, bisect_right(times, struck) - 1)
    last = bisect_right(times, over) + 1
    return max(pairwise(times[first:last]), key=lambda pair: pair[1] - pair[0], default=None)


def _next(times: list[float], moment: float) -> float | None:
    place = bisect_right(times, moment)
    return times[place] if place < len(times) else None

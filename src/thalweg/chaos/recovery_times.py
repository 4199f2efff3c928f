"""Detection, stall and rejoin times of each fault.

    begins     detected              stall ends        ended         rejoined
      |------------|--------------------|-----------------|------------|
                   a rank reports       end of the longest             every rank that was hit
                   a rank that was hit  gap between steps              has finished a step again

The stall is that of the ranks that weren't hit: the longest time between two steps of one of them
that contains the beginning of the fault, counted from there, or that begins later, when members
rendezvous.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from thalweg.chaos.fault import Fault
from thalweg.chaos.history import Healed, History, Named, Recovered, Struck
from thalweg.facts import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTimes:
    """The times of one fault; None for what didn't happen."""

    fault: Fault
    hit: frozenset[int]
    injected: float  # this and the next two are points in time
    healed: float | None
    recovered: float | None
    reports: tuple[Named, ...]  # that name a rank that was hit
    detected: float | None  # seconds since the fault began
    stall_seconds: float | None  # of the ranks that weren't hit
    rejoin_seconds: float | None  # since the fault ended


def fault_times(history: History, cluster: Cluster) -> list[FaultTimes]:
    """The times of every fault that began, in order."""
    commits: dict[int, list[float]] = defaultdict(list)
    for commit in sorted(history.commits, key=attrgetter("time")):
        commits[commit.rank].append(commit.time)
    end = max((record.time for record in history.events), default=0.0)
    spans: dict[Fault, tuple[float, float]] = {}
    for fault in history.faults:
        begin = history.time_of(Struck, fault.number)
        recovered = history.time_of(Recovered, fault.number)
        if begin is not None:
            spans[fault] = begin, end if recovered is None else recovered
    found = []
    for fault, (begin, over) in spans.items():
        others = [f for f, span in spans.items() if span[0] <= over and begin <= span[1]]
        down = {rank for other in others for rank in other.hits(cluster)}
        up = {rank: times for rank, times in commits.items() if rank not in down}
        found.append(_times_of(history, fault, fault.hits(cluster), commits, up, begin, over))
    return found


def _times_of(
    history: History,
    fault: Fault,
    hit: frozenset[int],
    commits: dict[int, list[float]],
    up: dict[int, list[float]],
    begin: float,
    over: float,
) -> FaultTimes:
    reports = [
        record
        for record in history.named
        if begin <= record.time  # the rank may have noticed another fault first
        and record.noticed <= over
        and hit & {*record.left, *record.joined}
    ]
    detected = min((max(begin, record.noticed) for record in reports), default=None)
    gaps = [gap for times in up.values() if (gap := _longest_gap(times, begin, over))]
    stall = max(gaps, key=lambda gap: gap[1] - gap[0], default=None)
    healed = history.time_of(Healed, fault.number)
    since = begin if healed is None else healed
    rejoined = [_next(commits[rank], since) for rank in hit]
    return FaultTimes(
        fault=fault,
        hit=hit,
        injected=begin,
        healed=healed,
        recovered=history.time_of(Recovered, fault.number),
        reports=tuple(reports),
        detected=None if detected is None else detected - begin,
        stall_seconds=None if stall is None else stall[1] - max(stall[0], begin),
        rejoin_seconds=None
        if not rejoined or None in rejoined
        else max(time for time in rejoined if time) - since,
    )


def _longest_gap(times: list[float], begin: float, over: float) -> tuple[float, float] | None:
    """The longest gap between two steps from the beginning of a fault until recovery."""
    first = max(0, bisect_right(times, begin) - 1)
    last = bisect_right(times, over) + 1
    return max(pairwise(times[first:last]), key=lambda pair: pair[1] - pair[0], default=None)


def _next(times: list[float], since: float) -> float | None:
    index = bisect_right(times, since)
    return times[index] if index < len(times) else None

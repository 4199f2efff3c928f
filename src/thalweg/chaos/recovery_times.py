"""Detection, stall and rejoin times of each fault.

    begins     detected              stall ends         ends          rejoined
      |------------|--------------------|-----------------|------------|
                   a rank reports       end of the longest             every rank that was hit
                   a rank that was hit  gap between steps              has finished a step again

A fault begins when it is injected (`Struck`), ends when its cause is gone (`Healed`): a link is
restored, a process resumed, and is recovered from when all ranks train together again
(`Recovered`). From its beginning to its recovery it is *open*.

The stall is that of the ranks that weren't hit by a fault that is open meanwhile: the longest time
between two steps of one of them that contains the beginning of the fault, counted from there, or
that begins later, when members rendezvous.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from thalweg.chaos.fault import Fault
from thalweg.chaos.history import Healed, History, Named, Recovered, Struck
from thalweg.facts import Cluster, grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTimes:
    """The times of one fault; None for what didn't happen."""

    fault: Fault
    hit: frozenset[int]
    injected: float  # points in time: the beginning, the end and the recovery
    healed: float | None
    recovered: float | None
    reports: tuple[Named, ...]  # that name a rank that was hit
    detected: float | None  # seconds since the beginning
    stall_seconds: float | None  # of the ranks that weren't hit
    rejoin_seconds: float | None  # since the end, or since the beginning if the fault didn't end


def fault_times(history: History, cluster: Cluster) -> list[FaultTimes]:
    """The times of every fault that began, in order."""
    in_order = sorted(history.commits, key=attrgetter("time"))
    commits = grouped((commit.rank, commit.time) for commit in in_order)
    run_end = max((record.time for record in history.events), default=0.0)
    spans: dict[Fault, tuple[float, float]] = {}  # in which each fault is open
    for fault in history.faults:
        begin = history.time_of(Struck, fault.number)
        recovered = history.time_of(Recovered, fault.number)
        if begin is not None:
            spans[fault] = begin, run_end if recovered is None else recovered
    times = []
    for fault, (begin, over) in spans.items():
        overlapping = [f for f, span in spans.items() if span[0] <= over and begin <= span[1]]
        hit = {rank for other in overlapping for rank in other.hits(cluster)}
        unhit = [commits[rank] for rank in commits if rank not in hit]
        times.append(_times_of(history, fault, fault.hits(cluster), commits, unhit, begin, over))
    return times


def _times_of(
    history: History,
    fault: Fault,
    hit: frozenset[int],
    commits: dict[int, list[float]],
    unhit: list[list[float]],
    begin: float,
    over: float,
) -> FaultTimes:
    """The times of a fault that was open from `begin` to `over`; `commits` are the times of the
    steps of each rank, `unhit` those of the ranks that no open fault had hit."""
    reports = [
        record
        for record in history.named
        if begin <= record.time  # the rank may have noticed another fault first
        and record.noticed <= over
        and hit & {*record.left, *record.joined}
    ]
    detected = min((max(begin, record.noticed) for record in reports), default=None)
    gaps = [gap for times in unhit if (gap := _longest_gap(times, begin, over))]
    stall = max(gaps, key=lambda gap: gap[1] - gap[0], default=None)
    healed = history.time_of(Healed, fault.number)
    end = begin if healed is None else healed
    rejoins = [time for rank in hit if (time := _next(commits.get(rank, []), end)) is not None]
    return FaultTimes(
        fault=fault,
        hit=hit,
        injected=begin,
        healed=healed,
        recovered=history.time_of(Recovered, fault.number),
        reports=tuple(reports),
        detected=None if detected is None else detected - begin,
        stall_seconds=None if stall is None else stall[1] - max(stall[0], begin),
        rejoin_seconds=max(rejoins) - end if rejoins and len(rejoins) == len(hit) else None,
    )


def _longest_gap(times: list[float], begin: float, over: float) -> tuple[float, float] | None:
    """The longest gap between two steps, of those that a fault from `begin` to `over` meets."""
    first = max(0, bisect_right(times, begin) - 1)
    last = bisect_right(times, over) + 1
    return max(pairwise(times[first:last]), key=lambda pair: pair[1] - pair[0], default=None)


def _next(times: list[float], since: float) -> float | None:
    """The first of these ascending times that is later than `since`."""
    index = bisect_right(times, since)
    return times[index] if index < len(times) else None

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
    return [_times_of(fault, history, cluster, spans, commits) for fault in spans]


def _times_of(
    fault: Fault,
    history: History,
    cluster: Cluster,
    spans: dict[Fault, tuple[float, float]],
    commits: dict[int, list[float]],
) -> FaultTimes:
    """The times of a fault; `commits` are the times of the steps of each rank, in order."""
    hit, (begin, over) = fault.hits(cluster), spans[fault]
    reports = [
        record
        for record in history.named
        if begin <= record.time  # the rank may have noticed another fault first
        and record.noticed <= over
        and hit & {*record.left, *record.joined}
    ]
    detected = min((max(begin, record.noticed) for record in reports), default=None)
    overlapping = [f for f, span in spans.items() if span[0] <= over and begin <= span[1]]
    hit_meanwhile = {rank for other in overlapping for rank in other.hits(cluster)}
    gaps = (
        gap
        for rank, times in commits.items()
        for gap in pairwise(times)
        if rank not in hit_meanwhile and gap[1] > begin and gap[0] <= over
    )
    stall = max(gaps, key=lambda gap: gap[1] - gap[0], default=None)
    healed = history.time_of(Healed, fault.number)
    end = begin if healed is None else healed
    next_steps = (next((t for t in commits.get(rank, ()) if t > end), None) for rank in hit)
    rejoins = [time for time in next_steps if time is not None]
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

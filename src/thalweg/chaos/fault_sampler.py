"""Which faults come: drawn from a seed alone, so that a run that failed can be had again.

A run can bear the loss of up to half of its ranks, since the others, at least half, form anew. So
faults overlap only so far: at most two at once, which hit different ranks, and together at most
half of all. Every fault heals, and unless the next one overlaps it all ranks train together again
before that comes. The store, the disk and checkpoints are hit while nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from thalweg.chaos.fault import FAULTS_WITHOUT_VICTIM, LASTING_FAULTS, Fault, FaultKind
from thalweg.errors import UsageError
from thalweg.facts import Cluster, Rack

FAULT_GAP_SECONDS = (0.2, 0.8)  # seconds of peace before a fault
OVERLAP_GAP_SECONDS = (0.1, 0.8)  # seconds between two that overlap
FAULT_HOLD_SECONDS = (1.5, 4.0)  # seconds that most last
SHORT_FAULT_SECONDS = (0.05, 0.4)  # ... and some, which may pass unnoticed
LONG_FAULT_SECONDS = (5.0, 15.0)  # some beyond what signs of life may ever stay away
OVERLAPPING_FAULT_FRACTION = 0.25  # share of faults that come before the last is over
DEGRADED_LINK_RATES = ("5mbit", "20mbit")  # of degraded links


def draw_faults(
    seed: int, cluster: Cluster, count: int, kinds: Sequence[FaultKind], hold: float | None = None
) -> list[Fault]:
    """So many faults of these kinds, in order. With `hold` each lasts so many seconds, if its kind
    lasts at all, and none overlaps another: for figures that compare."""
    if cluster.workers < 2:
        raise UsageError("one worker has nobody to go on without it", "give two or more")
    random = Random(seed)
    faults: list[Fault] = []
    for number in range(count):
        before = faults[-1] if faults else None
        fault = _one(random, number, cluster, random.choice(kinds))
        if hold is not None:
            fault = replace(fault, hold=hold if fault.kind in LASTING_FAULTS else 0.0)
        elif (
            before is not None
            and random.random() < OVERLAPPING_FAULT_FRACTION
            and _fit(before, fault, cluster)
        ):
            fault = replace(fault, after=_seconds(random, OVERLAP_GAP_SECONDS), overlaps=True)
        faults.append(fault)
    return faults


def max_ranks_down(cluster: Cluster) -> int:
    """So many ranks may be hit at once."""
    return cluster.workers // 2


def _fit(before: Fault, fault: Fault, cluster: Cluster) -> bool:
    """Whether both can be borne at once."""
    if before.overlaps or {before.kind, fault.kind} & set(FAULTS_WITHOUT_VICTIM):
        return False
    first, second = before.hits(cluster), fault.hits(cluster)
    return not first & second and len(first | second) <= max_ranks_down(cluster)


def _one(random: Random, number: int, cluster: Cluster, kind: FaultKind) -> Fault:
    rank: int | None = None
    rack: int | None = None
    peer: int | None = None
    if kind not in FAULTS_WITHOUT_VICTIM:
        rank = random.randrange(cluster.workers)
    if kind in ("cut", "oneway", "degrade") and random.random() < 0.25:
        bearable = [
            n for n, r in enumerate(cluster.racks) if _workers(r) <= max_ranks_down(cluster)
        ]
        if bearable:
            rank, rack = None, random.choice(bearable)
    if kind == "blackhole":
        peer = random.choice([other for other in range(cluster.workers) if other != rank])
    return Fault(
        number=number,
        kind=kind,
        rank=rank,
        rack=rack,
        peer=peer,
        direction=random.choice(("out", "in")) if kind == "oneway" else "both",
        rate=random.choice(DEGRADED_LINK_RATES) if kind == "degrade" else None,
        after=_seconds(random, FAULT_GAP_SECONDS),
        hold=_hold(random, kind),
    )


def _hold(random: Random, kind: FaultKind) -> float:
    if kind not in LASTING_FAULTS:
        return 0.0
    luck = random.random()
    return _seconds(
        random,
        SHORT_FAULT_SECONDS
        if luck < 0.2
        else LONG_FAULT_SECONDS
        if luck > 0.9
        else FAULT_HOLD_SECONDS,
    )


def _seconds(random: Random, bounds: tuple[float, float]) -> float:
    return round(random.uniform(*bounds), 3)


def _workers(rack: Rack) -> int:
    return sum(len(host.ranks) for host in rack.hosts)

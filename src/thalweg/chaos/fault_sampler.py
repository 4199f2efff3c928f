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

from thalweg.chaos.fault import LASTING, OF_NOBODY, Fault, Kind
from thalweg.errors import UsageError
from thalweg.facts import Cluster, Rack

GAP = (0.2, 0.8)  # seconds of peace before a fault
BETWEEN = (0.1, 0.8)  # seconds between two that overlap
HOLD = (1.5, 4.0)  # seconds that most last
BLINK = (0.05, 0.4)  # ... and some, which may pass unnoticed
LONG = (5.0, 15.0)  # some beyond what signs of life may ever stay away
OVERLAPPING = 0.25  # share of faults that come before the last is over
RATES = ("5mbit", "20mbit")  # of degraded links


def draw(
    seed: int, cluster: Cluster, count: int, kinds: Sequence[Kind], hold: float | None = None
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
            fault = replace(fault, hold=hold if fault.kind in LASTING else 0.0)
        elif before is not None and random.random() < OVERLAPPING and _fit(before, fault, cluster):
            fault = replace(fault, after=_seconds(random, BETWEEN), overlaps=True)
        faults.append(fault)
    return faults


def most_out(cluster: Cluster) -> int:
    """So many ranks may be hit at once."""
    return cluster.workers // 2


def _fit(before: Fault, fault: Fault, cluster: Cluster) -> bool:
    """Whether both can be borne at once."""
    if before.overlaps or {before.kind, fault.kind} & set(OF_NOBODY):
        return False
    first, second = before.hits(cluster), fault.hits(cluster)
    return not first & second and len(first | second) <= most_out(cluster)


def _one(random: Random, number: int, cluster: Cluster, kind: Kind) -> Fault:
    rank: int | None = None
    rack: int | None = None
    peer: int | None = None
    if kind not in OF_NOBODY:
        rank = random.randrange(cluster.workers)
    if kind in ("cut", "oneway", "degrade") and random.random() < 0.25:
        bearable = [n for n, r in enumerate(cluster.racks) if _workers(r) <= most_out(cluster)]
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
        rate=random.choice(RATES) if kind == "degrade" else None,
        after=_seconds(random, GAP),
        hold=_hold(random, kind),
    )


def _hold(random: Random, kind: Kind) -> float:
    if kind not in LASTING:
        return 0.0
    luck = random.random()
    return _seconds(random, BLINK if luck < 0.2 else LONG if luck > 0.9 else HOLD)


def _seconds(random: Random, bounds: tuple[float, float]) -> float:
    return round(random.uniform(*bounds), 3)


def _workers(rack: Rack) -> int:
    return sum(len(host.ranks) for host in rack.hosts)

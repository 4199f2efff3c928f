"""Faults, and how a seed alone decides which of them a run gets.

kind       what happens                                        ends when
kill       a worker is killed                                  it is restarted
restart    a worker is killed and restarted at once            -
pause      a worker is stopped (SIGSTOP)                       it is resumed
cut        a NIC or an uplink drops all, in both directions    the link is healed
oneway     the same in one direction                           the link is healed
blackhole  packets of one host to one other host are lost      the route is restored
degrade    a NIC or an uplink is slow                          its declared rate is restored
garble     bytes that a host sends to other hosts change       they arrive unchanged
store      the process that hosts the store is killed          it is restarted at once
disk       the disk for checkpoints is full                    it has free space
corrupt    bytes of the newest checkpoint are flipped          the next checkpoint

A run survives the loss of up to half of its ranks, since at least half continue. So at most two
faults overlap, they hit different ranks, and together at most half of all ranks; a rack that has
more ranks is never hit. A black hole counts as two ranks where it overlaps another fault. Alone it
may hit any two, also of two or three ranks, since it is survived by leaving out one of them. Every
fault ends, and all ranks train together again before the next fault, unless that overlaps. The
store, the disk and checkpoints are hit while no other fault is active.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, get_args

from thalweg.errors import UsageError
from thalweg.facts import Cluster, Duration, Rate
from thalweg.lab.event import Event, directions

FaultKind = Literal[
    "kill",
    "restart",
    "pause",
    "cut",
    "oneway",
    "blackhole",
    "degrade",
    "garble",
    "store",
    "disk",
    "corrupt",
]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
LINK_FAULTS: tuple[FaultKind, ...] = ("cut", "oneway", "blackhole", "degrade", "garble")  # in a lab
FAULTS_WITHOUT_VICTIM: tuple[FaultKind, ...] = ("store", "disk", "corrupt")  # no worker is hit
LASTING_FAULTS: tuple[FaultKind, ...] = ("kill", "pause", *LINK_FAULTS, "disk")

FAULT_GAP_SECONDS = (0.2, 0.8)  # between recovery and the next fault
OVERLAP_GAP_SECONDS = (0.1, 0.8)  # between two faults that overlap
FAULT_HOLD_SECONDS = (1.5, 4.0)  # duration of most faults
SHORT_FAULT_SECONDS = (0.05, 0.4)  # duration of faults that may pass unnoticed
LONG_FAULT_SECONDS = (5.0, 15.0)  # some exceed every heartbeat timeout
OVERLAPPING_FAULT_FRACTION = 0.25  # of the faults that may overlap the one before
RACK_FAULT_FRACTION = 0.25  # of the faults of a link; the others hit a NIC
SHORT_FAULT_FRACTION, LONG_FAULT_FRACTION = 0.2, 0.1  # of the faults that last
DEGRADED_LINK_RATES = ("5mbit", "20mbit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault as it was drawn; one of `rank` and `rack` is given, or none if no worker is hit."""

    number: int
    kind: FaultKind
    rank: int | None = None
    rack: int | None = None
    peer: int | None = None  # the rank that a black hole separates from `rank`
    direction: Literal["out", "in", "both"] = "both"
    rate: str | None = None  # of a degraded link
    after: float  # seconds since recovery, or since the previous fault if it overlaps that
    hold: float = 0.0  # seconds until it ends
    overlaps: bool = False  # True if it begins before the previous fault is over

    def event(self, now: Duration) -> Event:
        """The event of this fault if it begins now, `now` after the start of the run."""
        return Event(
            action="cut" if self.kind == "oneway" else self.kind,
            at=now,
            until=Duration(now.seconds + self.hold),
            rack=self.rack,
            rank=self.rank,
            peer=self.peer,
            rate=None if self.rate is None else Rate.parse(self.rate),
            directions=directions(self.direction),
        )

    def hits(self, cluster: Cluster) -> frozenset[int]:
        """The ranks that may be unreachable because of this fault."""
        if self.rack is not None:
            return frozenset(cluster.racks[self.rack].ranks)
        return frozenset(rank for rank in (self.rank, self.peer) if rank is not None)

    def __str__(self) -> str:
        target = "" if self.rank is None else f" rank {self.rank}"
        target += "" if self.rack is None else f" rack {self.rack}"
        target += "" if self.peer is None else f" to rank {self.peer}"
        direction = "" if self.direction == "both" else f" ({self.direction})"
        rate = "" if self.rate is None else f" at {self.rate}"
        hold = f" for {self.hold:g} s" if self.hold else ""
        return f"fault {self.number}: {self.kind}{target}{direction}{rate}{hold}"


def draw_faults(
    seed: int, cluster: Cluster, count: int, kinds: Sequence[FaultKind], hold: float | None = None
) -> list[Fault]:
    """Draw `count` faults of these kinds, in order. With `hold` each lasts that many seconds, if
    its kind lasts at all, and none overlaps another, so that their times can be compared."""
    if cluster.workers < 2:
        raise UsageError("a run of one worker can't survive a fault", "give two or more workers")
    random = Random(seed)
    faults: list[Fault] = []
    for number in range(count):
        fault = _draw(random, number, cluster, random.choice(kinds))
        if hold is not None:
            fault = replace(fault, hold=hold if fault.kind in LASTING_FAULTS else 0.0)
        elif (
            faults
            and random.random() < OVERLAPPING_FAULT_FRACTION
            and _may_overlap(faults[-1], fault, cluster)
        ):
            fault = replace(fault, after=_seconds(random, OVERLAP_GAP_SECONDS), overlaps=True)
        faults.append(fault)
    return faults


def max_ranks_down(cluster: Cluster) -> int:
    """The number of ranks that faults may hit at once, except for a single black hole."""
    return cluster.workers // 2


def _may_overlap(before: Fault, fault: Fault, cluster: Cluster) -> bool:
    if before.overlaps or {before.kind, fault.kind} & set(FAULTS_WITHOUT_VICTIM):
        return False
    first, second = before.hits(cluster), fault.hits(cluster)
    return not first & second and len(first | second) <= max_ranks_down(cluster)


def _draw(random: Random, number: int, cluster: Cluster, kind: FaultKind) -> Fault:
    rack = peer = None
    rank = None if kind in FAULTS_WITHOUT_VICTIM else random.randrange(cluster.workers)
    if kind in ("cut", "oneway", "degrade") and random.random() < RACK_FAULT_FRACTION:
        limit = max_ranks_down(cluster)
        small = [n for n, candidate in enumerate(cluster.racks) if len(candidate.ranks) <= limit]
        if small:
            rank, rack = None, random.choice(small)
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
        hold=_hold(random) if kind in LASTING_FAULTS else 0.0,
    )


def _hold(random: Random) -> float:
    luck = random.random()
    if luck < SHORT_FAULT_FRACTION:
        return _seconds(random, SHORT_FAULT_SECONDS)
    is_long = luck > 1 - LONG_FAULT_FRACTION
    return _seconds(random, LONG_FAULT_SECONDS if is_long else FAULT_HOLD_SECONDS)


def _seconds(random: Random, bounds: tuple[float, float]) -> float:
    return round(random.uniform(*bounds), 3)

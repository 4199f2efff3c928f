"""One thing that goes wrong: what, to whom, when, and for how long.

kind       what happens                                        heals by
kill       a worker is killed                                  being started again
restart    a worker is killed, and another started at once     -
pause      a worker is stopped (SIGSTOP)                       going on
cut        a NIC or an uplink swallows all, both ways          being whole
oneway     the same in one direction                           being whole
blackhole  one host's packets to one other are lost            being whole
degrade    a NIC or an uplink is slow                          its declared rate
garble     bytes that a host sends to others change            reaching them as they were
store      the process that hosts the store is killed          being started again, at once
disk       the disk that checkpoints go to is full             room
corrupt    bytes of the newest checkpoint are flipped          the next checkpoint
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from thalweg.facts import Cluster

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Of `rank` and `rack` one is given, or none if no worker is hit."""

    number: int
    kind: FaultKind
    rank: int | None = None
    rack: int | None = None
    peer: int | None = None  # of a black hole: whom the packets don't reach
    direction: Literal["out", "in", "both"] = "both"
    rate: str | None = None  # of a degraded link
    after: float  # seconds: since all was well again, or since the one before if it overlaps
    hold: float = 0.0  # seconds until it is healed
    overlaps: bool = False  # with the one before: doesn't wait until that is over

    def hits(self, cluster: Cluster) -> frozenset[int]:
        """The ranks that may be out because of it."""
        if self.rack is not None:
            return frozenset(r for host in cluster.racks[self.rack].hosts for r in host.ranks)
        return frozenset(rank for rank in (self.rank, self.peer) if rank is not None)

    def __str__(self) -> str:
        who = "" if self.rank is None else f" rank {self.rank}"
        who += "" if self.rack is None else f" rack {self.rack}"
        who += "" if self.peer is None else f" to rank {self.peer}"
        way = "" if self.direction == "both" else f" ({self.direction})"
        to = "" if self.rate is None else f" at {self.rate}"
        long = f" for {self.hold:g} s" if self.hold else ""
        return f"fault {self.number}: {self.kind}{who}{way}{to}{long}"

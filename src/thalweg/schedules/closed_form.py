"""The symbols of closed forms, as in Table II of DS-Sync (Wang et al., 2022).

A topology declares its form, the cost of one synchronisation on even racks with full-duplex links:
the bytes on its busiest NIC and uplink, the number of sequential moves, and the phases that can't
overlap. Where the table has another term, the form's docstring says why. Forms count messages and
bytes only: no additions, no compression, no TCP headers, and no bandwidth lost to many flows on one
link.

    N, C, G       workers, racks, workers of a rack
    S             bytes that are synchronised
    alpha         seconds that a message takes besides its bytes
    beta1, beta2  seconds for a byte on a NIC, on a rack's uplink
    L             messages that S is sent in, one synchronisation each (a layer, a bucket)
    k             chunks that each of them is cut into, to be passed on while others arrive
    crossing      seconds that the path from one rack into another adds; 0 in the paper
    r             members of a rack whose successor in the order of rank numbers is in another rack
    turn          turn of a period, where turns differ; None is the mean over the period

All links are full duplex, and S, G and the betas are those of one direction. A byte between racks
crosses two NICs as well as two uplinks, so it takes max(beta1, beta2) on idle links.

The cost of one synchronisation is the sum of its phases. A phase moves all S bytes one stage
further; it takes the longer of its busiest NIC's and its busiest uplink's seconds. With k pipelined
chunks, the first goes through all phases alone, and each further one is delayed only by the busiest
link, which serves all phases, and by the phase with the most messages:

    latency  = L [ sum(moves) + (k-1) max(moves) ] alpha  +  L sum(crossings) crossing
    transfer = sum(phases) / k  +  (1 - 1/k) busiest

With k = 1 nothing overlaps; with many chunks only the busiest link counts. For h equal hops over
links of their own this is the pipeline's (k + h - 1)(alpha + S beta / k), from which
`schedules.chunks` derives the number of chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from thalweg.schedules.group import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbols:
    N: int
    C: int = 1
    G: int
    S: float
    alpha: float = 0.0
    beta1: float
    beta2: float = 0.0  # 0: no uplink is ever the bottleneck
    L: int = 1
    k: int = 1
    crossing: float = 0.0
    r: int = 1
    turn: int | None = None

    @classmethod
    def of(cls, group: Group, nbytes: float) -> Self:
        """The symbols of a group: its largest rack, slowest NIC and slowest uplink. A form is exact
        with them only if the group `is_even`."""
        return cls(
            N=group.size,
            C=len(group.racks),
            G=max(map(len, group.racks)),
            S=nbytes,
            alpha=group.cluster.latency.seconds,
            beta1=1 / group.slowest_nic(),
            beta2=max((1 / rate for _, rate in group.uplinks()), default=0.0),
            crossing=group.longest_seconds() - group.cluster.latency.seconds,
            r=_leaving_in_rank_order(group),
        )


def _leaving_in_rank_order(group: Group) -> int:
    """The largest number of members of a rack whose successor in a ring in the order of rank
    numbers is in another rack."""
    rack_of = {rank: number for number, rack in enumerate(group.racks) for rank in rack}
    order = sorted(group.ranks)
    pairs = zip(order, (*order[1:], order[0]), strict=True)
    crossing = Counter(rack_of[a] for a, b in pairs if rack_of[a] != rack_of[b])
    return max(crossing.values(), default=0)


def is_even(group: Group) -> bool:
    """True if racks have one size, each member has a host of its own, and rates are the same
    everywhere in both directions, as the symbols assume."""
    cluster = group.cluster
    sizes = {len(rack) for rack in group.racks}
    hosts = {cluster.host(rank).name for rank in group.ranks}
    nics = {cluster.host(rank).nic for rank in group.ranks}
    uplinks = {cluster.rack(rack[0]).uplink for rack in group.racks}
    alike = len(sizes) == len(nics) == 1 and (len(uplinks) == 1 or len(group.racks) == 1)
    symmetric = all(link is None or link.out == link.into for link in (*nics, *uplinks))
    return alike and symmetric and len(hosts) == group.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A number of sequential messages, `moves`, of which `crossings` lead into another rack, and
    the bytes on the busiest NIC and the busiest uplink in one direction."""

    moves: int = 0
    crossings: int = 0
    nic: float = 0.0
    uplink: float = 0.0

    def seconds(self, x: Symbols) -> float:
        return max(self.nic * x.beta1, self.uplink * x.beta2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    moves: int  # sequential, of one chunk
    nic: float  # bytes on the busiest NIC, in one direction
    uplink: float
    latency: float  # seconds
    transfer: float
    busiest: float  # seconds of `transfer` in which the busiest link is busy
    each: float  # seconds of latency per further chunk; 0 if chunks don't overlap, so one is best
    exact: bool = True  # these are the bytes of the schedule, if racks are even

    @property
    def seconds(self) -> float:
        return self.latency + self.transfer


ClosedForm = Callable[..., Cost]
"""Maps symbols, and a topology's arguments by name, to the cost of one synchronisation."""


def cost(x: Symbols, *phases: Phase, busiest: Phase | None = None) -> Cost:
    """The cost of phases that move all S bytes in x.k chunks. `busiest` is the load of the busiest
    links over all phases, and the moves per further chunk; if None, all phases load the same
    links."""
    if busiest is None:
        busiest = Phase(
            moves=max((phase.moves for phase in phases), default=0),
            nic=sum(phase.nic for phase in phases),
            uplink=sum(phase.uplink for phase in phases),
        )
    moves = sum(phase.moves for phase in phases)
    crossings = sum(phase.crossings for phase in phases)
    busy = busiest.seconds(x)
    each = x.L * busiest.moves * x.alpha
    return Cost(
        moves=moves,
        nic=busiest.nic,
        uplink=busiest.uplink,
        latency=x.L * (moves * x.alpha + crossings * x.crossing) + (x.k - 1) * each,
        transfer=sum(p.seconds(x) for p in phases) / x.k + (1 - 1 / x.k) * busy,
        busiest=busy,
        each=each,
    )

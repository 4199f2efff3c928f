"""The symbols of closed forms, as in Table II of DS-Sync (Wang et al., 2022).

    N, C, G       workers, racks, workers of a rack
    S             bytes that are synchronised
    alpha         seconds that a message takes besides its bytes
    beta1, beta2  seconds for a byte on a NIC, on a rack's uplink
    P             parameter servers
    L             messages that S is sent in, one synchronisation each (a layer, a bucket)
    k             chunks that each of them is cut into, to be passed on while others arrive
    crossing      seconds that the way from one rack into another adds; 0 in the paper

All links are full duplex, and S, G and the betas are those of one direction. A byte between racks
crosses two NICs as well as two uplinks, so it takes max(beta1, beta2) where it is alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from thalweg.facts import Duplex
from thalweg.schedules import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbols:
    N: int
    C: int = 1
    G: int
    S: float
    alpha: float = 0.0
    beta1: float
    beta2: float = 0.0  # 0: no uplink is ever the bottleneck
    P: int = 1
    L: int = 1
    k: int = 1
    crossing: float = 0.0

    @classmethod
    def of(cls, group: Group, nbytes: float) -> Self:
        """Of members that may be uneven: the largest rack, the slowest NIC and uplink. A form is
        exact then only if the group `is_even`."""
        return cls(
            N=group.size,
            C=len(group.racks),
            G=max(map(len, group.racks)),
            S=nbytes,
            alpha=group.cluster.latency.seconds,
            beta1=1 / group.slowest_nic(),
            beta2=max((1 / rate for _, rate in group.uplinks()), default=0.0),
            crossing=group.longest_seconds() - group.cluster.latency.seconds,
        )


def is_even(group: Group) -> bool:
    """Racks of one size, a host for each member, and the same rates everywhere in both directions:
    what the symbols assume."""
    cluster = group.cluster
    sizes = {len(rack) for rack in group.racks}
    hosts = {cluster.host(rank).name for rank in group.ranks}
    nics = {_rates(cluster.host(rank).nic) for rank in group.ranks}
    uplinks = {_rates(cluster.rack(rack[0]).uplink) for rack in group.racks}
    alike = len(sizes) == len(nics) == 1 and (len(uplinks) == 1 or len(group.racks) == 1)
    one_way = all(rates is None or rates[0] == rates[1] for rates in (*nics, *uplinks))
    return alike and one_way and len(hosts) == group.size


def _rates(link: Duplex | None) -> tuple[float, float] | None:
    return None if link is None else (link.out.bits_per_second, link.into.bits_per_second)

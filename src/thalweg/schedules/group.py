"""The members of a round and their places in the cluster: the input of a topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thalweg.errors import LayoutError
from thalweg.facts import Cluster, Duplex
from thalweg.schedules.shuffle.contended_links import ContendedLinks, contended_links, declared


@dataclass(frozen=True, slots=True)
class Group:
    """The members of a round. `racks` are the members rack by rack, host by host, whatever their
    numbers; `order` is the same in one line, so neighbours in it are neighbours in the network."""

    ranks: tuple[int, ...]
    cluster: Cluster
    contention: ContendedLinks | None = None  # as the cluster's rates have it if None
    racks: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    order: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.ranks:
            raise LayoutError("a group without members", "name at least one rank")
        members = set(self.ranks)
        if len(members) < len(self.ranks):
            raise LayoutError(f"a rank is twice in {self.ranks}", "name every rank once")
        for rank in self.ranks:
            self.cluster.host(rank)  # refuses a rank that isn't there
        racks = [
            tuple(rank for rank in rack.ranks if rank in members) for rack in self.cluster.racks
        ]
        object.__setattr__(self, "racks", tuple(rack for rack in racks if rack))
        object.__setattr__(self, "order", tuple(rank for rack in racks for rank in rack))

    @classmethod
    def everybody(cls, cluster: Cluster) -> Group:
        """The group of all ranks of a cluster."""
        return cls(tuple(range(cluster.workers)), cluster)

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def racks_from(self, root: int) -> tuple[tuple[int, ...], ...]:
        """The racks with this member's first, and this member first in it."""
        own = next(rack for rack in self.racks if root in rack)
        others = tuple(rack for rack in self.racks if rack is not own)
        return ((root, *(rank for rank in own if rank != root)), *others)

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """A group of some of the members, of the same cluster."""
        return Group(tuple(ranks), self.cluster, self.contention)

    @property
    def contended(self) -> ContendedLinks:
        """The links that are too slow for an averaging at every step."""
        return contended_links(self, declared(self)) if self.contention is None else self.contention

    def best_connected(self) -> int:
        """The member with the fastest NIC, the first of equals: where a master belongs."""
        return max(self.order, key=lambda rank: _slower(self.cluster.host(rank).nic))

    def slowest_nic(self) -> float:
        """The rate of the slowest direction of the members' NICs in bytes per second."""
        nics = [self.cluster.host(rank).nic for rank in self.ranks]
        return min(_slower(nic) for nic in nics)

    def uplinks(self) -> list[tuple[tuple[int, ...], float]]:
        """The racks that have a limited uplink to cross, and its bytes per second."""
        if len(self.racks) == 1:
            return []
        limited = [(rack, self.cluster.rack(rack[0]).uplink) for rack in self.racks]
        return [(rack, _slower(uplink)) for rack, uplink in limited if uplink is not None]

    def slowest_bytes_per_second(self) -> float:
        """The rate of the slowest NIC or uplink that the members use."""
        return min([self.slowest_nic(), *(rate for _, rate in self.uplinks())])

    def longest_seconds(self) -> float:
        """The highest latency between two members."""
        leaders = [rack[0] for rack in self.racks]
        extra = sorted(self.cluster.rack(leader).latency.seconds for leader in leaders)
        across = sum(extra[-2:]) if len(leaders) > 1 else 0.0
        return self.cluster.latency.seconds + across


def _slower(duplex: Duplex) -> float:
    """The rate of the slower direction in bytes per second."""
    return min(duplex.out, duplex.into).bits_per_second / 8

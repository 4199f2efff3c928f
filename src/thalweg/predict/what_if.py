"""The same job elsewhere: another network, other workers, faster computing, later hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from thalweg.errors import UsageError
from thalweg.facts import (
    Cluster,
    Costs,
    Duplex,
    Duration,
    Host,
    Rack,
    Rate,
    StragglerDelay,
    Workload,
)
from thalweg.facts.cluster import MAX_WORKERS


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """`bandwidth` is that of the slowest NIC; all other links change in proportion. `compute` is
    how many times faster computing is."""

    bandwidth: Rate | None = None
    workers: int | None = None
    compute: float = 1.0
    late: StragglerDelay | None = None

    def cluster(self, cluster: Cluster) -> Cluster:
        if self.workers is not None:
            cluster = with_workers(cluster, self.workers)
        if self.bandwidth is not None:
            cluster = scaled(cluster, self.bandwidth.bits_per_second / slowest_nic(cluster))
        if self.late is not None:
            cluster = _with_lateness(cluster, self.late)
        return cluster

    def workload(self, workload: Workload) -> Workload:
        if not isfinite(self.compute) or self.compute <= 0:
            raise UsageError(
                f"computing can't be {self.compute:g} times as fast", "give a number above 0"
            )
        if self.compute == 1:
            return workload
        costs = workload.costs
        tensors = tuple(
            tensor
            if tensor.ready is None
            else replace(tensor, ready=Duration(tensor.ready.seconds / self.compute))
            for tensor in workload.tensors
        )
        faster = Costs(
            forward=Duration(costs.forward.seconds / self.compute),
            backward=Duration(costs.backward.seconds / self.compute),
            optimizer=Duration(costs.optimizer.seconds / self.compute),
        )
        return replace(workload, tensors=tensors, costs=faster)


def slowest_nic(cluster: Cluster) -> float:
    """Bits per second."""
    return min(min(h.nic.out, h.nic.into).bits_per_second for h in cluster.hosts)


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """All links so many times as fast."""

    def times(link: Duplex) -> Duplex:
        return Duplex(
            Rate(link.out.bits_per_second * factor), Rate(link.into.bits_per_second * factor)
        )

    racks = tuple(
        replace(
            rack,
            uplink=None if rack.uplink is None else times(rack.uplink),
            hosts=tuple(replace(host, nic=times(host.nic)) for host in rack.hosts),
        )
        for rack in cluster.racks
    )
    return replace(cluster, racks=racks)


def with_workers(cluster: Cluster, workers: int) -> Cluster:
    """So many workers, spread over as many racks, one after the other on hosts like those there
    are. An uplink stays what it is."""
    if workers == cluster.workers:
        return cluster
    if not 1 <= workers <= MAX_WORKERS:
        raise UsageError(f"{workers} workers can't be", f"give 1 to {MAX_WORKERS}")
    racks = cluster.racks[:workers]
    base, more = divmod(workers, len(racks))
    made, first = [], 0
    for number, rack in enumerate(racks):
        left, hosts = base + (number < more), list[Host]()
        while left:
            like = rack.hosts[len(hosts) % len(rack.hosts)]
            here = min(left, len(like.ranks))
            hosts.append(_host(like, rack, len(hosts), tuple(range(first, first + here))))
            first, left = first + here, left - here
        made.append(replace(rack, hosts=tuple(hosts)))
    return replace(cluster, racks=tuple(made))


def _host(like: Host, rack: Rack, number: int, ranks: tuple[int, ...]) -> Host:
    return replace(like, name=f"{rack.name}-{number}", ranks=ranks)


def _with_lateness(cluster: Cluster, delay: StragglerDelay) -> Cluster:
    racks = tuple(
        replace(rack, hosts=tuple(replace(host, late=delay) for host in rack.hosts))
        for rack in cluster.racks
    )
    return replace(cluster, racks=racks)

"""What-if variants of a situation: another network, other workers, faster compute, stragglers."""

from __future__ import annotations

from dataclasses import fields, replace
from math import isfinite

from thalweg.errors import UsageError
from thalweg.facts import (
    Cluster,
    Costs,
    Duration,
    Host,
    Rate,
    Situation,
    StragglerDelay,
    Workload,
)
from thalweg.facts.cluster import MAX_WORKERS


def suppose(
    situation: Situation,
    *,
    bandwidth: Rate | None = None,
    workers: int | None = None,
    compute: float = 1.0,
    late: StragglerDelay | None = None,
) -> Situation:
    """The situation with some facts changed. `bandwidth` is that of the slowest NIC, and scales all
    other links; `compute` is the compute speed relative to now."""

    def changed(cluster: Cluster) -> Cluster:
        if workers is not None:
            cluster = with_workers(cluster, workers)
        if bandwidth is not None:
            cluster = scaled(cluster, bandwidth.bits_per_second / slowest_nic(cluster))
        return cluster if late is None else cluster.with_hosts(lambda h: replace(h, late=late))

    return replace(
        situation,
        cluster=changed(situation.cluster),
        workload=_with_speed(situation.workload, compute),
        declared=None if situation.declared is None else changed(situation.declared),
    )


def _with_speed(workload: Workload, speed: float) -> Workload:
    """The workload, computed this many times as fast."""
    if not isfinite(speed) or speed <= 0:
        raise UsageError(f"compute can't be {speed:g} times as fast", "give a number above 0")
    if speed == 1:
        return workload

    def faster(duration: Duration) -> Duration:
        return Duration(duration.seconds / speed)

    costs = workload.costs
    tensors = tuple(
        replace(tensor, ready=None if tensor.ready is None else faster(tensor.ready))
        for tensor in workload.tensors
    )
    less = Costs(**{each.name: faster(getattr(costs, each.name)) for each in fields(costs)})
    return replace(workload, tensors=tensors, costs=less)


def slowest_nic(cluster: Cluster) -> float:
    """The rate of the slowest NIC in bits per second."""
    return min(min(h.nic.out, h.nic.into).bits_per_second for h in cluster.hosts)


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with the rates of all links multiplied by a factor."""
    rates = cluster.rates().items()
    return cluster.with_rates({link: Rate(rate.bits_per_second * factor) for link, rate in rates})


def with_workers(cluster: Cluster, workers: int) -> Cluster:
    """The cluster with this number of workers, distributed over the same number of racks, on copies
    of their hosts. Uplinks don't change."""
    if workers == cluster.workers:
        return cluster
    if not 1 <= workers <= MAX_WORKERS:
        raise UsageError(f"{workers} workers are not possible", f"give 1 to {MAX_WORKERS}")
    racks = cluster.racks[:workers]
    base, more = divmod(workers, len(racks))
    made, first = [], 0
    for number, rack in enumerate(racks):
        left, hosts = base + (number < more), list[Host]()
        while left:
            like = rack.hosts[len(hosts) % len(rack.hosts)]
            here = min(left, len(like.ranks))
            name, ranks = f"{rack.name}-{len(hosts)}", tuple(range(first, first + here))
            hosts.append(replace(like, name=name, ranks=ranks))
            first, left = first + here, left - here
        made.append(replace(rack, hosts=tuple(hosts)))
    return replace(cluster, racks=tuple(made))

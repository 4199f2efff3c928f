"""The input of every prediction: a workload on a cluster, whose machines have their costs; and
variants of it: another network, other workers, faster compute, stragglers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite

from thalweg.errors import UsageError
from thalweg.facts.cluster import MAX_WORKERS, Cluster, Host, StragglerDelay
from thalweg.facts.files import (
    format_cluster,
    format_machine,
    format_workload,
    parse_cluster,
    parse_machine,
    parse_workload,
)
from thalweg.facts.machine import Machine
from thalweg.facts.units import Duration, Rate
from thalweg.facts.workload import Costs, Workload

FREE_MACHINE = Machine(assumed=("per-message overhead: 0 (not measured)",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A workload on a cluster, and the costs of its machines: those of messages, bytes and codecs
    are 0 by default. `declared` is the cluster that the run lays its schedules out for, if that
    isn't the measured one."""

    cluster: Cluster
    workload: Workload
    machine: Machine = FREE_MACHINE
    declared: Cluster | None = None

    @property
    def laid_out_for(self) -> Cluster:
        """The cluster that the run lays its schedules out for."""
        return self.declared or self.cluster

    @property
    def assumed(self) -> tuple[str, ...]:
        """The assumptions that stand in for measurements of the cluster and of its machines."""
        return (*self.cluster.assumed, *self.machine.assumed)


def format_situation(situation: Situation, remarks: Sequence[str] = ()) -> dict[str, str]:
    """The texts of the situation's files by field, the cluster's with remarks at its head."""
    texts = {
        "cluster": format_cluster(situation.cluster, remarks),
        "machine": format_machine(situation.machine),
        "workload": format_workload(situation.workload),
    }
    declared = situation.declared
    return texts if declared is None else {**texts, "declared": format_cluster(declared)}


def parse_situation(texts: Mapping[str, str]) -> Situation:
    """The situation from the texts of its files by field."""
    return Situation(
        cluster=parse_cluster(texts["cluster"]),
        machine=parse_machine(texts["machine"]),
        workload=parse_workload(texts["workload"]),
        declared=parse_cluster(texts["declared"]) if "declared" in texts else None,
    )


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

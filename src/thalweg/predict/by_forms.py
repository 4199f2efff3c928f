"""A step in closed form, for clusters that are too large to be replayed.

Every bucket's exchange takes what its form says (`synchronisation.py`), and buckets follow one
another on the links: bucket b begins when it is ready and b-1 is over, so the last one is exposed.
For equal buckets that is the T_obs of `observed.py`.
"""

from __future__ import annotations

from dataclasses import replace

from thalweg.catalog import Catalog
from thalweg.errors import PlanError
from thalweg.facts import Cluster, Duration, Rate, Road, Size, Workload
from thalweg.facts.cluster import Duplex
from thalweg.plan import Plan
from thalweg.predict.synchronisation import synchronisation_seconds
from thalweg.schedules import Group


def seconds_by_forms(
    plan: Plan, group: Group, cluster: Cluster, workload: Workload, road: Road, catalog: Catalog
) -> float:
    """Of a step, computing included."""
    slowed = Group(group.ranks, _at_what_a_flow_gets(cluster, road))
    costs = workload.costs
    exchanges = []
    kept: dict[int, float] = {}
    for bucket in workload.buckets(plan.settings.bucket):
        if bucket.nbytes not in kept:
            alone = replace(workload, tensors=tuple(reversed(bucket.tensors)))
            whole = replace(plan, settings=replace(plan.settings, bucket=Size(alone.nbytes + 1)))
            seconds = synchronisation_seconds(whole, slowed, alone, catalog)
            if seconds is None:
                raise PlanError(
                    f"{plan} has no closed form for {group.size} workers",
                    "predict it for fewer, or without the compressor",
                )
            kept[bucket.nbytes] = seconds
        exchanges.append((bucket.ready_seconds, kept[bucket.nbytes]))
    if plan.averages_parameters:
        whole_step = costs.forward.seconds + costs.backward.seconds + costs.optimizer.seconds
        return whole_step + sum(seconds for _, seconds in exchanges) / plan.cadence.every
    over = 0.0
    for ready, seconds in exchanges:
        over = max(over, ready) + seconds
    return costs.forward.seconds + max(over, costs.backward.seconds) + costs.optimizer.seconds


def _at_what_a_flow_gets(cluster: Cluster, road: Road) -> Cluster:
    """The same with the rates that one flow reaches, and messages that take their receiver's
    time."""
    share = road.share(1)

    def slower(link: Duplex) -> Duplex:
        return Duplex(
            Rate(link.out.bits_per_second * share), Rate(link.into.bits_per_second * share)
        )

    racks = tuple(
        replace(
            rack,
            uplink=None if rack.uplink is None else slower(rack.uplink),
            hosts=tuple(replace(host, nic=slower(host.nic)) for host in rack.hosts),
        )
        for rack in cluster.racks
    )
    latency = Duration(cluster.latency.seconds + road.message.value)
    return replace(cluster, racks=racks, latency=latency)

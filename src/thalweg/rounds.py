"""From a plan and a step to the rounds of that step: the same on every rank, without asking.

Gradient plans have a round for each payload of each bucket, when the bucket is ready; parameter
plans after the optimizer step. A payload that can be added goes through the topology's own
schedule. One that can't is exchanged in two shots (each rank decodes and adds one shard, then all
gather the shards) or gathered whole, whichever costs less here; averaging parameters always
gathers, so that what was rounded off is known and the mean is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from thalweg.catalog import Catalog, default_catalog
from thalweg.compress import Compressor, Payload
from thalweg.declarations import Promise
from thalweg.errors import PlanError
from thalweg.facts import Bucket, Workload
from thalweg.plan import Choice, Plan, What
from thalweg.schedules import Group, Schedule, Topology, all_gather, all_to_all


class When(Enum):
    READY = "when the bucket is ready"
    AFTER = "after the optimizer step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One exchange among one group."""

    step: int
    when: When
    delay: int  # steps until the result is applied
    bucket: int
    group: Group
    what: What
    payload: Payload
    codec: Choice | None
    schedule: Schedule
    promise: Promise

    def __str__(self) -> str:
        return f"bucket {self.bucket}: {self.payload.name} of {self.what.value}"


def compile_rounds(
    plan: Plan,
    group: Group,
    workload: Workload,
    step: int,
    catalog: Catalog | None = None,
) -> tuple[Round, ...]:
    """All rounds of all groups at this step, in order; a rank takes part in those of its groups."""
    return tuple(_Compiler(plan, step, catalog or default_catalog()).rounds(group, workload))


class _Compiler:
    def __init__(self, plan: Plan, step: int, catalog: Catalog) -> None:
        self.plan = plan
        self.step = step
        self.catalog = catalog
        self.promise = catalog.guarantee(plan).promise
        self.topology = _schedulable(plan, catalog)
        self.compressor = catalog.compressors[plan.precision.name] if plan.precision else None
        self.built: dict[tuple[tuple[int, ...], Payload], list[Schedule]] = {}

    def rounds(self, group: Group, workload: Workload) -> Iterator[Round]:
        groups = self._groups(group)
        for bucket in workload.buckets(self.plan.settings.bucket) if groups else ():
            for payload in self._payloads(bucket):
                for members in groups:
                    for schedule in self._schedules_once(members, payload):
                        yield self._round(bucket, members, payload, schedule)

    def _groups(self, group: Group) -> tuple[Group, ...]:
        cadence = self.plan.cadence
        if (self.step + 1) % cadence.every == 0:
            divide = self.topology.groups
            return (group,) if divide is None else divide(group, self.step)
        if cadence.inside_every is not None and (self.step + 1) % cadence.inside_every == 0:
            return tuple(group.subgroup(rack) for rack in group.racks)
        return ()

    def _payloads(self, bucket: Bucket) -> list[Payload]:
        if self.compressor is None or self.plan.precision is None:
            return [Payload("values", bucket.elements, bucket.itemsize, exact=True)]
        arguments = self.plan.precision.arguments
        return self.compressor.payloads(bucket.tensors, self.step, **arguments)

    def _schedules_once(self, group: Group, payload: Payload) -> list[Schedule]:
        """Buckets of one size share their schedules."""
        key = group.ranks, payload
        if key not in self.built:
            self.built[key] = self._schedules(group, payload)
        return self.built[key]

    def _schedules(self, group: Group, payload: Payload) -> list[Schedule]:
        if payload.exact or self.compressor is None or self._adds(self.compressor):
            return [self._topology_schedule(group, payload)]
        shards = self.compressor.elementwise and self.plan.what is What.GRADIENTS
        if shards and _two_shot_seconds(group, payload) < _gather_seconds(group, payload):
            return [
                all_to_all(group, payload.elements, payload.itemsize),
                all_gather(group, payload.elements, payload.itemsize),
            ]
        return [all_gather(group, payload.elements * group.size, payload.itemsize)]

    def _adds(self, compressor: Compressor) -> bool:
        """Whether payloads are added on the way. Averaged parameters are gathered instead, unless
        the topology itself is what mixes them."""
        mixing = self.topology.mixes and self.topology.groups is None
        return compressor.summable and (self.plan.what is What.GRADIENTS or mixing)

    def _topology_schedule(self, group: Group, payload: Payload) -> Schedule:
        size = payload.elements, payload.itemsize
        arguments = self.plan.topology.arguments
        if self.plan.redundancy is not None and self.topology.coded is not None:
            family = self.catalog.codes[self.plan.redundancy.name]
            code = family.make(group.size, self.plan.redundancy.arguments["stragglers"])  # type: ignore[arg-type]
            return self.topology.coded(group, *size, self.step, **arguments, code=code)
        return self.topology.build(group, *size, self.step, **arguments)

    def _round(self, bucket: Bucket, group: Group, payload: Payload, schedule: Schedule) -> Round:
        gradients = self.plan.what is What.GRADIENTS
        return Round(
            step=self.step,
            when=When.READY if gradients else When.AFTER,
            delay=self.plan.cadence.delay,
            bucket=bucket.index,
            group=group,
            what=self.plan.what,
            payload=payload,
            codec=None if payload.exact else self.plan.precision,
            schedule=schedule,
            promise=self.promise,
        )


def _two_shot_seconds(group: Group, payload: Payload) -> float:
    """An exchange of shards, in which a rack's members each send to all other racks, and a ring
    that gathers the shards; each NIC carries (N-1)/N of the payload in both."""
    others, size = group.size - 1, group.size
    nic = 2 * others / size * payload.nbytes / group.slowest_nic()
    uplinks = [
        (len(rack) * (size - len(rack)) + others) / size * payload.nbytes / rate
        for rack, rate in group.uplinks()
    ]
    return max([nic, *uplinks]) + 2 * others * group.longest_seconds()


def _gather_seconds(group: Group, payload: Payload) -> float:
    """A ring that gathers everybody's whole payload: N-1 of them on every NIC and uplink."""
    others = group.size - 1
    transfer = others * payload.nbytes / group.slowest_bytes_per_second()
    return transfer + others * group.longest_seconds()


def _schedulable(plan: Plan, catalog: Catalog) -> Topology:
    """The plan's topology; PlanError for plans that have no common rounds."""
    if plan.topology.name == "auto":
        raise PlanError("auto has no rounds before it has chosen", "name a plan")
    topology = catalog.topologies[plan.topology.name]
    if plan.cadence.staleness is not None:
        raise PlanError(f"{plan} has no common rounds: everybody goes at its own pace", "try ps")
    if plan.redundancy is not None and plan.redundancy.name not in catalog.codes:
        raise PlanError(f"{plan} has no rounds in this version", "try gc(stragglers=1)")
    if plan.redundancy is not None and topology.coded is None:
        raise PlanError(f"{plan} has no rounds in this version", "try gc(stragglers=1)")
    return topology

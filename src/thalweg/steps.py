"""The rounds of a plan at a step, computed on every rank alike without communication.

Gradient plans have a round for each payload of each bucket, when the bucket is ready; parameter
plans after the optimizer step. A summable payload takes the topology's own schedule. Others are
exchanged in two shots (each rank decodes and sums one shard, then all gather the shards) or
gathered whole, whichever is faster here. Averages of parameters never take two shots:
x += mean Q(x) - Q(x) preserves the mean only if all ranks add the same Q's. Before compression
starts (`warmup`) everything is sent uncompressed; but parameters of two bytes as float32, since a
mean that is rounded to their own type would change replicas that are equal.

A plan may compress between racks only: each rack reduces to its first rank, the first ranks of all
racks exchange their sums, and broadcast the result in their racks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import lcm

from thalweg.catalog import Catalog, default_catalog
from thalweg.compress import Payload, arrange
from thalweg.declarations import Promise
from thalweg.errors import PlanError
from thalweg.facts import Bucket, Size, Workload
from thalweg.plan import Choice, Plan, What
from thalweg.redundancy import allocation_of, is_coded, is_relayed, spare_ranks, waits_for_nobody
from thalweg.schedules import (
    AveragingGroup,
    Group,
    Schedule,
    Topology,
    all_gather,
    all_to_all,
    broadcast,
    coded_tree,
    reduce,
)
from thalweg.schedules.chunks import split
from thalweg.schedules.topologies.ring import ring
from thalweg.schedules.topology import COMPRESS_BETWEEN

MAX_CHAINS_IN_FLIGHT = 2  # chains that a rank's engine runs at the same time
ALL_GATHER, ALL_TO_ALL = "all_gather", "all_to_all"
PART_PAYLOAD = "part"  # of a bucket, exchanged between the ranks of racks that hold the same part
CHAIN_FANOUT = 1  # of a tree
TINY_WORKLOAD = Workload.of_size(Size.parse("4KB"))
RACK_SUM_PAYLOAD, RESULT_PAYLOAD = "rack's sum", "result"  # of compression between racks only


class When(Enum):
    READY = "when the bucket is ready"
    AFTER = "after the optimizer step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One collective operation of one group on one payload. Rounds of different groups with the
    same number are concurrent. A payload that takes two shots has two stages."""

    step: int
    number: int  # in this step
    stage: int  # of its payload
    when: When
    delay: int  # steps until the result is applied
    lasts: int  # steps during which its members have no other round
    bucket: int
    span: tuple[int, int]  # first and end element of the bucket
    group: Group
    what: What
    payload: Payload
    codec: Choice | None
    schedule: Schedule
    promise: Promise

    def __str__(self) -> str:
        return f"bucket {self.bucket}: {self.payload.name} of {self.what.value}"

    def contributions(self, rank: int) -> int:
        """The number of members whose payloads are in this rank's result."""
        if self.schedule.name in (ALL_GATHER, ALL_TO_ALL):  # which don't reduce
            return self.group.size
        return self.schedule.divisor(rank)


def compile_rounds(
    plan: Plan,
    group: Group,
    workload: Workload,
    step: int,
    catalog: Catalog | None = None,
) -> tuple[Round, ...]:
    """All rounds of all groups at this step in order; a rank takes part in those of its groups."""
    compiler = _Compiler(plan, step, catalog or default_catalog())
    return tuple(compiler.rounds(group, travelling(plan, workload)))


def travelling(plan: Plan, workload: Workload) -> Workload:
    """The workload with the types in which its tensors are sent uncompressed."""
    return workload.in_float32() if plan.averages_parameters else workload


def cycle(plan: Plan, group: Group, catalog: Catalog | None = None) -> int:
    """The number of steps after which the rounds repeat."""
    catalog = catalog or default_catalog()
    topology = _schedulable(plan, catalog)
    turns = catalog.compressors[plan.precision.name].period if plan.precision else 1
    return lcm(plan.cadence.every * topology.period(group), turns)


def without_groups(plan: Plan, group: Group, catalog: Catalog | None = None) -> str:
    """A warning that a plan of changing groups has only one group here; otherwise empty."""
    divide = (catalog or default_catalog()).topologies[plan.topology.name].groups
    if divide is None or group.size == 1 or len(group.racks) > 1 or len(divide(group, 0)) > 1:
        return ""
    return (
        f"{plan} has one group here: all {group.size} workers are in one rack, so all of them "
        "average at every step; describe the racks in a cluster file, or use ring"
    )


def warm_up(plan: Plan) -> int:
    """The number of steps before compression starts."""
    steps = plan.precision.arguments["warmup"] if plan.precision is not None else 0
    assert isinstance(steps, int)
    return steps


def refuse_what_cannot_run(plan: Plan, group: Group, *, has_data: bool) -> None:
    """Raise PlanError or LayoutError if this group can't run the plan; codes need `has_data`."""
    if waits_for_nobody(plan):
        spare_ranks(plan, group)
    else:
        compile_rounds(plan, group, TINY_WORKLOAD, 0)
    if is_relayed(plan) and not has_data:
        raise PlanError(
            f"{plan} gives stragglers fewer samples, which needs data= and batch=",
            "give data= and batch= to attach()",
        )


class _Compiler:
    def __init__(self, plan: Plan, step: int, catalog: Catalog) -> None:
        self.plan = plan
        self.step = step
        self.turn = step // plan.cadence.every  # of groups and directions
        self.catalog = catalog
        self.promise = catalog.guarantee(plan).promise
        self.topology = _schedulable(plan, catalog)
        self.compressor = catalog.compressors[plan.precision.name] if plan.precision else None
        self.compresses = self.compressor is not None and step >= warm_up(plan)
        self.built: dict[tuple[tuple[int, ...], Payload], list[Schedule]] = {}

    def rounds(self, group: Group, workload: Workload) -> Iterator[Round]:
        if self.plan.cadence.two_levels and len(group.racks) > 1:
            yield from self._two_levels(group, workload)
            return
        between = (
            self.compresses
            and self.plan.topology.arguments.get("compress") == COMPRESS_BETWEEN
            and len(group.racks) > 1
        )
        leaders = (AveragingGroup(group.subgroup([rack[0] for rack in group.racks])),)
        averaging_groups = leaders if between else self._groups(group)
        number = 0
        for bucket in workload.buckets(self.plan.settings.bucket) if averaging_groups else ():
            if between:
                number = yield from self._in_racks(number, bucket, group, RACK_SUM_PAYLOAD, reduce)
            for payload in self._payloads(bucket):
                schedules = [self._cached_schedules(one.group, payload) for one in averaging_groups]
                exchanges = zip(averaging_groups, schedules, strict=True)
                number = yield from self._exchange(number, bucket, payload, exchanges)
            if between:
                number = yield from self._in_racks(number, bucket, group, RESULT_PAYLOAD, broadcast)

    def _exchange(
        self,
        number: int,
        bucket: Bucket,
        payload: Payload,
        exchanges: Iterable[tuple[AveragingGroup, Sequence[Schedule]]],
    ) -> Generator[Round, None, int]:
        """The concurrent exchanges of groups; returns the number of the next round."""
        stages = 0
        for averaging_group, schedules in exchanges:
            stages = max(stages, len(schedules))
            for stage, schedule in enumerate(schedules):
                yield self._round(number + stage, stage, bucket, averaging_group, payload, schedule)
        return number + stages

    def _in_racks(
        self,
        number: int,
        bucket: Bucket,
        group: Group,
        name: str,
        build: Callable[[Group, int, int, int, int], Schedule],
    ) -> Generator[Round, None, int]:
        """A chain in each rack that reduces to its first rank, or broadcasts from it."""
        payload = replace(self._whole(bucket), name=name)
        racks = [(group.subgroup(rack), rack[0]) for rack in group.racks]
        size = payload.elements, payload.itemsize
        chains = [(AveragingGroup(r), [build(r, *size, root, CHAIN_FANOUT)]) for r, root in racks]
        return (yield from self._exchange(number, bucket, payload, chains))

    def _two_levels(self, group: Group, workload: Workload) -> Iterator[Round]:
        """Racks average at every step. When all racks synchronise, the j-th rank of each rack then
        averages the j-th part of its rack's result with the others, which is applied a step later:
        the exchange overlaps with the next step."""
        parts = min(len(rack) for rack in group.racks)
        across = [group.subgroup([rack[part] for rack in group.racks]) for part in range(parts)]
        number = 0
        for bucket in workload.buckets(self.plan.settings.bucket):
            [payload] = self._payloads(bucket)
            for rack in group.racks:
                members = group.subgroup(rack)
                schedule = ring(members, payload.elements, payload.itemsize, self.step)
                inside = AveragingGroup(members)
                round_ = self._round(number, 0, bucket, inside, payload, schedule)
                yield replace(round_, delay=0)
            start = 0
            for members, size in zip(across, split(bucket.elements, parts), strict=True):
                if not self._all_synchronise:
                    break
                part = Payload(PART_PAYLOAD, size, bucket.itemsize, exact=True)
                schedule = ring(members, size, bucket.itemsize, self.step)
                round_ = self._round(number + 1, 0, bucket, AveragingGroup(members), part, schedule)
                yield replace(round_, span=(start, start + size))
                start += size
            number += 2

    @property
    def _all_synchronise(self) -> bool:
        return (self.step + 1) % self.plan.cadence.every == 0

    def _groups(self, group: Group) -> tuple[AveragingGroup, ...]:
        if self._all_synchronise:
            divide = self.topology.groups
            return (AveragingGroup(group),) if divide is None else divide(group, self.turn)
        if self.plan.cadence.inside:
            return tuple(AveragingGroup(group.subgroup(rack)) for rack in group.racks)
        return ()

    def _payloads(self, bucket: Bucket) -> list[Payload]:
        if not self.compresses or self.compressor is None or self.plan.precision is None:
            return [self._whole(bucket)]
        arguments = self.plan.precision.arguments
        return self.compressor.payloads(bucket.tensors, self.step, **arguments)

    def _whole(self, bucket: Bucket) -> Payload:
        """The uncompressed payload, with the padding that the compressor needs."""
        arguments = self.plan.precision.arguments if self.plan.precision else {}
        elements = arrange(bucket.tensors, self.compressor, arguments).elements
        return Payload("values", elements, bucket.itemsize, exact=True)

    def _cached_schedules(self, group: Group, payload: Payload) -> list[Schedule]:
        key = group.ranks, payload
        if key not in self.built:
            self.built[key] = self._schedules(group, payload)
        return self.built[key]

    def _schedules(self, group: Group, payload: Payload) -> list[Schedule]:
        size = payload.elements, payload.itemsize
        if payload.exact or self.compressor is None or self.compressor.summable:
            if is_coded(self.plan, self.catalog):
                return [coded_tree(group, *size, allocation_of(self.plan, group, self.catalog))]
            return [self.topology.build(group, *size, self.turn, **self.plan.topology.arguments)]
        shards = self.compressor.elementwise and not self.plan.averages_parameters
        if shards and _two_shot_seconds(group, payload) < _gather_seconds(group, payload):
            return [all_to_all(group, *size), all_gather(group, *size)]
        return [all_gather(group, payload.elements * group.size, payload.itemsize)]

    def _round(
        self,
        number: int,
        stage: int,
        bucket: Bucket,
        averaging_group: AveragingGroup,
        payload: Payload,
        schedule: Schedule,
    ) -> Round:
        return Round(
            step=self.step,
            number=number,
            stage=stage,
            when=When.AFTER if self.plan.averages_parameters else When.READY,
            delay=self.plan.cadence.delay + (averaging_group.lasts - 1) * self.plan.cadence.every,
            lasts=averaging_group.lasts,
            bucket=bucket.index,
            span=(0, bucket.elements),
            group=averaging_group.group,
            what=self.plan.what,
            payload=payload,
            codec=None if payload.exact else self.plan.precision,
            schedule=schedule,
            promise=self.promise,
        )


def _two_shot_seconds(group: Group, payload: Payload) -> float:
    """The seconds of an all-to-all of shards, in which a rack's members each send to all other
    racks, and a ring all-gather; each NIC carries (N-1)/N of the payload in both."""
    others, size = group.size - 1, group.size
    nic = 2 * others / size * payload.nbytes / group.slowest_nic()
    uplinks = [
        (len(rack) * (size - len(rack)) + others) / size * payload.nbytes / rate
        for rack, rate in group.uplinks()
    ]
    return max([nic, *uplinks]) + 2 * others * group.longest_seconds()


def _gather_seconds(group: Group, payload: Payload) -> float:
    """The seconds of a ring all-gather of whole payloads: N-1 of them on every NIC and uplink."""
    others = group.size - 1
    transfer = others * payload.nbytes / group.slowest_bytes_per_second()
    return transfer + others * group.longest_seconds()


def _schedulable(plan: Plan, catalog: Catalog) -> Topology:
    """The plan's topology; PlanError for plans that have no common rounds."""
    if plan.topology.name == "auto":
        raise PlanError("auto has no rounds before it has chosen", "name a plan")
    topology = catalog.topologies[plan.topology.name]
    if plan.cadence.staleness is not None:
        raise PlanError(f"{plan} has no common rounds: workers are asynchronous", "try ps")
    if plan.redundancy is not None and not is_coded(plan, catalog):
        raise PlanError(f"{plan} has no common rounds: stragglers answer a step later", "try gc")
    return topology

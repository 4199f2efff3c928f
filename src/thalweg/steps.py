"""The chains of a plan at a step: how each bucket travels. They are computed on every rank alike
without communication, and run, predicted and explained as they are.

The buckets of gradient plans are sent when they are ready, those of parameter plans after the
optimizer step. A summable payload takes the topology's own schedule. Others are
exchanged in two shots (each rank decodes and sums one shard, then all gather the shards) or
gathered whole, whichever is faster here. Averages of parameters never take two shots:
x += mean Q(x) - Q(x) preserves the mean only if all ranks add the same Q's. Before compression
starts (`warmup`) everything is sent uncompressed; but parameters of two bytes as float32, since a
mean that is rounded to their own type would change replicas that are equal.

A plan may compress between racks only: each rack reduces to its first rank, the first ranks of all
racks exchange their sums, and broadcast the result in their racks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import lcm

from thalweg.catalog import Catalog, default_catalog
from thalweg.compress import Payload, arrange
from thalweg.errors import PlanError
from thalweg.facts import Bucket, Size, Workload
from thalweg.plan import Plan
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
DDP_FIRST_BUCKET = Size.parse("1MiB")  # at which DDP closes its first bucket
ALL_GATHER, ALL_TO_ALL = "all_gather", "all_to_all"
CHAIN_FANOUT = 1  # of a tree
TINY_WORKLOAD = Workload.of_size(Size.parse("4KB"))


class Work(Enum):
    """The codec's work before the rounds of a stage."""

    NOTHING = "nothing"
    ENCODE = "encode"
    REDUCE = "reduce"  # the next payload is made from the result of the last one
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Round:
    """One collective operation of one group on one payload. Rounds of different groups with the
    same number are concurrent."""

    number: int  # in this step, which labels its messages
    group: Group
    payload: Payload
    schedule: Schedule

    def contributions(self, rank: int) -> int:
        """The number of members whose payloads are in this rank's result."""
        if self.schedule.name in (ALL_GATHER, ALL_TO_ALL):  # which don't reduce
            return self.group.size
        return self.schedule.divisor(rank)


@dataclass(frozen=True, slots=True)
class Stage:
    """Concurrent rounds, after the codec's work. With the first encoded payload come, in this
    order, its scales and the uncompressed rest of the bucket."""

    rounds: tuple[Round, ...]
    work: Work = Work.NOTHING

    def of(self, rank: int) -> Stage:
        """The stage with the rounds of this rank alone."""
        return Stage(tuple(r for r in self.rounds if rank in r.group.ranks), self.work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The stages in which one group exchanges one bucket, one after the other. A part of a bucket
    (`span`) follows when the whole bucket has its result."""

    bucket: int
    stages: tuple[Stage, ...]
    delay: int = 0  # steps until the result is applied
    lasts: int = 1  # steps during which its group has no other
    span: tuple[int, int] | None = None  # first and end element of a part; None for the whole

    @property
    def rounds(self) -> Iterator[Round]:
        return (round_ for stage in self.stages for round_ in stage.rounds)

    @property
    def encoded(self) -> tuple[Round, ...]:
        """The rounds of encoded payloads; none if nothing is encoded."""
        works = (Work.ENCODE, Work.REDUCE)
        return tuple(stage.rounds[0] for stage in self.stages if stage.work in works)

    def contributions(self, rank: int) -> int:
        """The number of contributions to the result of a rank's chain, by which each is divided so
        that the sum is a mean."""
        return next(self.rounds).contributions(rank)

    def of(self, rank: int) -> Chain | None:
        """The chain of this rank, with its own rounds; None without any. A rank of a rack for which
        another rank encodes has no codec work."""
        own = tuple(stage.of(rank) for stage in self.stages)
        if not any(stage.rounds for stage in own):
            return None
        if not any(stage.rounds and stage.work is Work.ENCODE for stage in own):
            own = tuple(Stage(stage.rounds) for stage in own if stage.rounds)
        return replace(self, stages=own)


@dataclass(frozen=True, slots=True)
class Step:
    """The chains of all groups at one step, in the order in which each rank sends its own, and how
    many round numbers they take."""

    chains: tuple[Chain, ...]
    numbers: int

    @property
    def concurrent(self) -> list[tuple[int, list[Round]]]:
        """The bucket and the rounds of each number, in the order of numbers."""
        found: dict[int, tuple[int, list[Round]]] = {}
        for chain in self.chains:
            for round_ in chain.rounds:
                found.setdefault(round_.number, (chain.bucket, []))[1].append(round_)
        return [found[number] for number in sorted(found)]

    @property
    def rounds(self) -> list[Round]:
        """All rounds, in the order of their numbers."""
        return [round_ for _, concurrent in self.concurrent for round_ in concurrent]

    def of(self, rank: int) -> tuple[Chain, ...]:
        """The chains in which this rank takes part."""
        return tuple(own for chain in self.chains if (own := chain.of(rank)) is not None)


def compile_step(
    plan: Plan, group: Group, workload: Workload, step: int, catalog: Catalog | None = None
) -> Step:
    """All chains of all groups at this step; a rank takes part in the rounds of its groups."""
    buckets = travelling(plan, workload).buckets(plan.settings.bucket)
    return compile_buckets(plan, group, buckets, step, catalog)


def compile_buckets(
    plan: Plan,
    group: Group,
    buckets: Sequence[Bucket],
    step: int,
    catalog: Catalog | None = None,
) -> Step:
    """All chains of all groups at this step, for buckets that something else has divided."""
    return _Compiler(plan, group, step, catalog or default_catalog()).step_of(buckets)


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
    steps = plan.precision.arguments.get("warmup", 0) if plan.precision is not None else 0
    assert isinstance(steps, int)
    return steps


def refuse_what_cannot_run(plan: Plan, group: Group, *, has_data: bool) -> None:
    """Raise PlanError or LayoutError if this group can't run the plan; codes need `has_data`."""
    if waits_for_nobody(plan):
        spare_ranks(plan, group)
    else:
        compile_step(plan, group, TINY_WORKLOAD, 0)
    if is_relayed(plan) and not has_data:
        raise PlanError(
            f"{plan} gives stragglers fewer samples, which needs data= and batch=",
            "give data= and batch= to attach()",
        )


class _Compiler:
    def __init__(self, plan: Plan, group: Group, step: int, catalog: Catalog) -> None:
        self.plan = plan
        self.group = group
        self.step = step
        self.turn = step // plan.cadence.every  # of groups and directions
        self.catalog = catalog
        self.topology = _schedulable(plan, catalog)
        self.compressor = catalog.compressors[plan.precision.name] if plan.precision else None
        self.compresses = self.compressor is not None and step >= warm_up(plan)
        self.all_synchronise = (step + 1) % plan.cadence.every == 0
        self.built: dict[tuple[tuple[int, ...], Payload], list[Schedule]] = {}

    def step_of(self, buckets: Sequence[Bucket]) -> Step:
        several_racks = len(self.group.racks) > 1
        compress = self.plan.topology.arguments.get("compress")
        if self.plan.cadence.two_levels and several_racks:
            chains_of = self._two_levels
        elif self.compresses and compress == COMPRESS_BETWEEN and several_racks:
            chains_of = self._between_racks
        else:
            chains_of = self._in_groups
        chains: list[Chain] = []
        numbers = 0
        for bucket in self._due(buckets):
            new = list(chains_of(bucket, numbers))
            numbers = max((r.number + 1 for chain in new for r in chain.rounds), default=numbers)
            chains += new
        return Step(tuple(chains), numbers)

    def _due(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """The buckets that travel at this step."""
        return buckets if self.all_synchronise or self.plan.cadence.inside else ()

    def _in_groups(self, bucket: Bucket, first: int) -> Iterator[Chain]:
        payloads, cadence = self._payloads(bucket), self.plan.cadence
        for averaging_group in self._groups:
            yield Chain(
                bucket=bucket.index,
                stages=tuple(self._exchange(payloads, averaging_group.group, first)),
                delay=cadence.delay + (averaging_group.lasts - 1) * cadence.every,
                lasts=averaging_group.lasts,
            )

    def _between_racks(self, bucket: Bucket, first: int) -> Iterator[Chain]:
        """Each rack reduces to its first rank; the first ranks of all racks exchange their sums,
        and broadcast the result in their racks."""
        leaders = self.group.subgroup([rack[0] for rack in self.group.racks])
        between = self._exchange(self._payloads(bucket), leaders, first + 1)
        number = first + 1 + sum(len(stage.rounds) for stage in between)
        result = self._in_racks(bucket, number, "result", broadcast)
        if between[-1].rounds:
            between.append(Stage(result))
        else:
            between[-1] = replace(between[-1], rounds=result)
        sums = Stage(self._in_racks(bucket, first, "rack's sum", reduce))
        delay = self.plan.cadence.delay
        yield Chain(bucket=bucket.index, stages=(sums, *between), delay=delay)

    def _in_racks(
        self,
        bucket: Bucket,
        number: int,
        name: str,
        build: Callable[[Group, int, int, int, int], Schedule],
    ) -> tuple[Round, ...]:
        """A tree in each rack that reduces to its first rank, or broadcasts from it."""
        payload = replace(self._whole(bucket), name=name)
        size = payload.elements, payload.itemsize
        rounds = []
        for rack in self.group.racks:
            group = self.group.subgroup(rack)
            schedule = build(group, *size, rack[0], CHAIN_FANOUT)
            rounds.append(Round(number, group, payload, schedule))
        return tuple(rounds)

    def _two_levels(self, bucket: Bucket, first: int) -> Iterator[Chain]:
        """Racks average at every step. When all racks synchronise, the j-th rank of each rack then
        averages the j-th part of its rack's result with the others, which is applied a step later:
        the exchange overlaps with the next step."""
        racks = self.group.racks
        [whole] = self._payloads(bucket)
        for rack in racks:
            yield Chain(bucket=bucket.index, stages=(self._ring(first, rack, whole),))
        if not self.all_synchronise:
            return
        start = 0
        for place, size in enumerate(split(bucket.elements, min(map(len, racks)))):
            part = Payload("part", size, bucket.itemsize, exact=True)
            yield Chain(
                bucket=bucket.index,
                stages=(self._ring(first + 1, [rack[place] for rack in racks], part),),
                delay=self.plan.cadence.delay,
                span=(start, start + size),
            )
            start += size

    def _ring(self, number: int, ranks: Sequence[int], payload: Payload) -> Stage:
        group = self.group.subgroup(ranks)
        schedule = ring(group, payload.elements, payload.itemsize, self.step)
        return Stage((Round(number, group, payload, schedule),))

    def _exchange(self, payloads: Sequence[Payload], group: Group, first: int) -> list[Stage]:
        """The stages in which a group exchanges these payloads: one for each shot of an encoded
        payload, and one in which the last result is decoded. What isn't encoded is sent in the
        first."""
        planned = [(payload, s) for payload in payloads for s in self._schedules(group, payload)]
        rounds = [Round(number, group, *each) for number, each in enumerate(planned, first)]
        plain = [round_ for round_ in rounds if round_.payload.exact]
        encoded = [round_ for round_ in rounds if not round_.payload.exact]
        if not encoded:
            return [Stage(tuple(plain))]
        return [
            Stage((encoded[0], *plain), Work.ENCODE),
            *(Stage((round_,), Work.REDUCE) for round_ in encoded[1:]),
            Stage((), Work.DECODE),
        ]

    @property
    def _groups(self) -> tuple[AveragingGroup, ...]:
        divide = self.topology.groups
        if self.plan.cadence.inside and not self.all_synchronise:
            return tuple(AveragingGroup(self.group.subgroup(rack)) for rack in self.group.racks)
        return (AveragingGroup(self.group),) if divide is None else divide(self.group, self.turn)

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

    def _schedules(self, group: Group, payload: Payload) -> list[Schedule]:
        key = group.ranks, payload
        if key not in self.built:
            self.built[key] = self._built(group, payload)
        return self.built[key]

    def _built(self, group: Group, payload: Payload) -> list[Schedule]:
        size = payload.elements, payload.itemsize
        if payload.exact or self.compressor is None or self.compressor.summable:
            if is_coded(self.plan, self.catalog):
                return [coded_tree(group, *size, allocation_of(self.plan, group, self.catalog))]
            return [self.topology.build(group, *size, self.turn, **self.plan.topology.arguments)]
        shards = self.compressor.elementwise and not self.plan.averages_parameters
        if shards and _two_shot_seconds(group, payload) < _gather_seconds(group, payload):
            return [all_to_all(group, *size), all_gather(group, *size)]
        return [all_gather(group, payload.elements * group.size, payload.itemsize)]


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

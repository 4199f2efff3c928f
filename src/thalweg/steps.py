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

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from thalweg.schedules.topologies.hierarchical import COMPRESS_BETWEEN
from thalweg.schedules.topologies.ring import ring

MAX_CHAINS_IN_FLIGHT = 2  # chains that a rank's engine runs at the same time
DDP_FIRST_BUCKET = Size.parse("1MiB")  # at which DDP closes its first bucket
ALL_GATHER, ALL_TO_ALL = "all_gather", "all_to_all"
CHAIN_FANOUT = 1  # of a tree
TINY_WORKLOAD = Workload.of_size(Size.parse("4KB"))


class Work(Enum):
    """What the codec does before the rounds of a stage."""

    NOTHING = "nothing"
    ENCODE = "encode"
    REDUCE = "reduce"  # the next payload is made from the result of the last one
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """The concurrent rounds of all groups, after the codec's work. With a payload come, in this
    order, the scales that it needs and the uncompressed rest of the bucket."""

    rounds: tuple[Round, ...]
    work: Work = Work.NOTHING

    def of(self, rank: int) -> Stage:
        """The rounds of this rank."""
        return Stage(tuple(r for r in self.rounds if rank in r.group.ranks), self.work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The stages in which one bucket travels, one after the other. A part of a bucket (`span`)
    follows when the whole bucket has its result."""

    bucket: int
    stages: tuple[Stage, ...]
    delay: int = 0  # steps until the result is applied
    lasts: int = 1  # steps during which its ranks have no other chain of this bucket
    span: tuple[int, int] | None = None  # first and end element of a part; None for the whole

    @property
    def rounds(self) -> Iterator[Round]:
        return (round_ for stage in self.stages for round_ in stage.rounds)

    @property
    def encoded(self) -> tuple[Round, ...]:
        """A group's rounds of encoded payloads, one of each stage; none if nothing is encoded."""
        works = (Work.ENCODE, Work.REDUCE)
        return tuple(stage.rounds[0] for stage in self.stages if stage.work in works)

    def contributions(self, rank: int) -> int:
        """The number of contributions to the result of a rank's chain, by which each one is divided:
        then the sum is a mean."""
        return next(self.rounds).contributions(rank)

    def of(self, rank: int) -> Chain | None:
        """The chain of this rank, with its own rounds; None without any. A rank of a rack for which
        another rank encodes has no codec work."""
        own = [(stage, stage.of(rank)) for stage in self.stages]
        if not any(mine.rounds for _, mine in own):
            return None
        if any(mine.rounds and mine.work is Work.ENCODE for _, mine in own):
            stages = [mine for stage, mine in own if mine.rounds or not stage.rounds]
        else:
            stages = [Stage(mine.rounds) for _, mine in own if mine.rounds]
        return replace(self, stages=tuple(stages))


@dataclass(frozen=True, slots=True)
class Step:
    """The chains of all groups at one step, in the order in which each rank sends its own, and how
    many round numbers they take."""

    chains: tuple[Chain, ...]
    numbers: int

    @property
    def concurrent(self) -> list[tuple[int, list[Round]]]:
        """The rounds of each number, in order, after the bucket that they are of."""
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
        """The chains of this rank."""
        return tuple(own for chain in self.chains if (own := chain.of(rank)) is not None)


def compile_step(
    plan: Plan,
    group: Group,
    workload: Workload,
    step: int,
    catalog: Catalog | None = None,
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
    """The same for buckets that something else has divided."""
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
    steps = plan.precision.arguments["warmup"] if plan.precision is not None else 0
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
        self.numbers = 0  # of rounds so far

    def step_of(self, buckets: Sequence[Bucket]) -> Step:
        several_racks = len(self.group.racks) > 1
        compress = self.plan.topology.arguments.get("compress")
        if self.plan.cadence.two_levels and several_racks:
            compiled = self._two_levels
        elif self.compresses and compress == COMPRESS_BETWEEN and several_racks:
            compiled = self._between_racks
        else:
            compiled = self._in_groups
        chains = tuple(chain for bucket in self._due(buckets) for chain in compiled(bucket))
        return Step(chains, self.numbers)

    def _due(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """The buckets that travel at this step."""
        return buckets if self.all_synchronise or self.plan.cadence.inside else ()

    def _in_groups(self, bucket: Bucket) -> Iterator[Chain]:
        """A chain of all groups whose averages last equally long."""
        cadence, first, ends = self.plan.cadence, self.numbers, [self.numbers]
        by_duration: dict[int, list[Group]] = {}
        for averaging_group in self._groups:
            by_duration.setdefault(averaging_group.lasts, []).append(averaging_group.group)
        for lasts, groups in by_duration.items():
            self.numbers = first
            stages = self._exchange(bucket, groups)
            delay = cadence.delay + (lasts - 1) * cadence.every
            yield Chain(bucket=bucket.index, stages=tuple(stages), delay=delay, lasts=lasts)
            ends.append(self.numbers)
        self.numbers = max(ends)

    def _between_racks(self, bucket: Bucket) -> Iterator[Chain]:
        """Each rack reduces to its first rank; the first ranks of all racks exchange their sums,
        and broadcast the result in their racks."""
        leaders = self.group.subgroup([rack[0] for rack in self.group.racks])
        sums = Stage(self._in_racks(bucket, "rack's sum", reduce))
        *stages, last = sums, *self._exchange(bucket, [leaders])
        result = self._in_racks(bucket, "result", broadcast)
        stages += [replace(last, rounds=result)] if not last.rounds else [last, Stage(result)]
        yield Chain(bucket=bucket.index, stages=tuple(stages), delay=self.plan.cadence.delay)

    def _in_racks(
        self, bucket: Bucket, name: str, build: Callable[[Group, int, int, int, int], Schedule]
    ) -> tuple[Round, ...]:
        """A tree in each rack that reduces to its first rank, or broadcasts from it."""
        payload = replace(self._whole(bucket), name=name)
        racks = [(self.group.subgroup(rack), rack[0]) for rack in self.group.racks]
        size = payload.elements, payload.itemsize
        return self._rounds(
            payload, [(rack, build(rack, *size, root, CHAIN_FANOUT)) for rack, root in racks]
        )

    def _two_levels(self, bucket: Bucket) -> Iterator[Chain]:
        """Racks average at every step. When all racks synchronise, the j-th rank of each rack then
        averages the j-th part of its rack's result with the others, which is applied a step later:
        the exchange overlaps with the next step."""
        racks = self.group.racks
        [whole] = self._payloads(bucket)
        inside = self._rings(whole, racks)
        yield Chain(bucket=bucket.index, stages=(Stage(inside),))
        sizes = split(bucket.elements, min(map(len, racks)))
        payloads = [Payload("part", size, bucket.itemsize, exact=True) for size in sizes]
        number, start = self.numbers, 0
        for place, payload in enumerate(payloads if self.all_synchronise else ()):
            self.numbers = number
            stage = Stage(self._rings(payload, [[rack[place] for rack in racks]]))
            span, delay = (start, start + payload.elements), self.plan.cadence.delay
            yield Chain(bucket=bucket.index, stages=(stage,), delay=delay, span=span)
            start += payload.elements
        self.numbers = number + 1

    def _rings(self, payload: Payload, members: Iterable[Sequence[int]]) -> tuple[Round, ...]:
        size = payload.elements, payload.itemsize
        groups = map(self.group.subgroup, members)
        return self._rounds(payload, [(group, ring(group, *size, self.step)) for group in groups])

    def _exchange(self, bucket: Bucket, groups: Sequence[Group]) -> list[Stage]:
        """The stages in which these groups exchange a bucket: one for each shot of each compressed
        payload, and one in which the last result is decoded. Whatever is uncompressed is sent in
        the first."""
        stages: list[Stage] = []
        uncompressed: list[Round] = []
        for payload in self._payloads(bucket):
            schedules = [self._cached_schedules(group, payload) for group in groups]
            for shot in range(max(map(len, schedules))):
                rounds = self._rounds(
                    payload,
                    [(g, s[shot]) for g, s in zip(groups, schedules, strict=True) if shot < len(s)],
                )
                if payload.exact:
                    uncompressed += rounds
                else:
                    stages.append(Stage(rounds, Work.REDUCE if stages else Work.ENCODE))
        if not stages:
            return [Stage(tuple(uncompressed))]
        first = replace(stages[0], rounds=(*stages[0].rounds, *uncompressed))
        return [first, *stages[1:], Stage((), Work.DECODE)]

    def _rounds(
        self, payload: Payload, schedules: Iterable[tuple[Group, Schedule]]
    ) -> tuple[Round, ...]:
        """Concurrent rounds, which take the next number."""
        number = self.numbers
        self.numbers += 1
        return tuple(
            Round(number=number, group=group, payload=payload, schedule=schedule)
            for group, schedule in schedules
        )

    @property
    def _groups(self) -> tuple[AveragingGroup, ...]:
        divide = self.topology.groups
        if not self.all_synchronise:
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

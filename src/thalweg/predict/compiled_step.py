"""What every rank does at a step: its buckets, when they are ready, through which rounds
they go, and what the compressor takes before and after them.

It follows what the runtime does: uncompressed rounds are handed in one by one, a compressed bucket
is a chain (encode, exchange, exchange again, decode). The backend has buckets of its own: the first
closes at 1 MiB unless the plan says how large buckets are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from thalweg.catalog import Catalog
from thalweg.facts import Bucket, CodecCost, FittedValue, Machine, Size, Workload
from thalweg.plan import Choice, Plan, PlanText, Settings
from thalweg.schedules import Group
from thalweg.steps import (
    ALL_GATHER,
    ALL_TO_ALL,
    RACK_SUM_PAYLOAD,
    RESULT_PAYLOAD,
    Round,
    compile_rounds,
    cycle,
    warm_up,
)

BACKEND_FIRST_BUCKET_SIZE = Size.parse("1MiB")


@dataclass(frozen=True, slots=True)
class Stage:
    """Rounds that run at once, after `codec` seconds of work."""

    codec: float
    rounds: tuple[Round, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """One bucket's way, on one rank; `decode` is the work at its end, `delay` how many steps later
    the result is needed."""

    ready: float  # seconds of backward
    stages: tuple[Stage, ...]
    decode: float
    delay: int


class StepChains:
    def __init__(
        self, plan: Plan, group: Group, workload: Workload, machine: Machine, catalog: Catalog
    ) -> None:
        self.plan = plan
        self.cycle = cycle(plan, group, catalog)
        self._group = group
        self._catalog = catalog
        self._cost = codec_cost(plan.precision, machine)
        compressor = catalog.compressors[plan.precision.name] if plan.precision else None
        self._always_gathers = compressor is not None and not compressor.elementwise
        self._first = warm_up(plan)
        self._workload = workload
        self._buckets = _buckets(plan, workload, catalog)
        self._kept: dict[int, dict[int, tuple[Chain, ...]]] = {}

    @property
    def buckets(self) -> int:
        return len(self._buckets)

    def at(self, step: int) -> dict[int, tuple[Chain, ...]]:
        """The chains of every rank, in the order in which they are handed in."""
        place = step % self.cycle
        if place not in self._kept:
            warm = -(-self._first // self.cycle) * self.cycle  # compression has begun
            rounds = list(self._rounds(warm + place))
            self._kept[place] = {rank: tuple(self._chains(rounds, rank)) for rank in self.ranks}
        return self._kept[place]

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._group.ranks

    def _rounds(self, step: int) -> Iterator[Round]:
        """Of the compiled rounds, or of those of the backend's own buckets."""
        if not self._catalog.is_native(self.plan):
            yield from compile_rounds(self.plan, self._group, self._workload, step, self._catalog)
            return
        for bucket in self._buckets:
            alone = replace(self._workload, tensors=tuple(reversed(bucket.tensors)))
            whole = replace(self.plan, settings=Settings(bucket=Size(alone.nbytes + 1)))
            for round_ in compile_rounds(whole, self._group, alone, step, self._catalog):
                yield replace(round_, number=bucket.index, bucket=bucket.index)

    def _chains(self, rounds: Iterable[Round], rank: int) -> Iterator[Chain]:
        own = [r for r in rounds if rank in r.group.ranks]
        for index, of_bucket in groupby(own, key=lambda r: r.bucket):
            bucket, stops = self._buckets[index], list(of_bucket)
            if any(
                r.codec is not None or r.payload.name in (RACK_SUM_PAYLOAD, RESULT_PAYLOAD)
                for r in stops
            ):
                yield self._compressed(bucket, stops)
            else:
                for round_ in stops:
                    stage = Stage(0.0, (round_,))
                    yield Chain(bucket.ready_seconds, (stage,), 0.0, round_.delay)

    def _compressed(self, bucket: Bucket, stops: Sequence[Round]) -> Chain:
        ways = [r for r in stops if r.codec is not None]
        inside = [r for r in stops if r.payload.name == RACK_SUM_PAYLOAD]
        back = [r for r in stops if r.payload.name == RESULT_PAYLOAD]
        beside = [r for r in stops if r not in ways and r not in inside and r not in back]
        encode, decode = self._codec_seconds(bucket, ways)
        stages = [Stage(0.0, tuple(inside))] if inside else []
        for number, way in enumerate(ways):
            stages.append(Stage(0.0 if number else encode, (way, *([] if number else beside))))
        if not ways and beside:
            stages.append(Stage(0.0, tuple(beside)))
        if back:
            stages.append(Stage(decode, tuple(back)))
            decode = 0.0
        return Chain(bucket.ready_seconds, tuple(stages), decode, stops[0].delay)

    def _codec_seconds(self, bucket: Bucket, ways: Sequence[Round]) -> tuple[float, float]:
        if not ways:
            return 0.0, 0.0
        cost, elements, first = self._cost, bucket.elements, ways[0]
        decode = cost.decode.value
        if first.schedule.name == ALL_TO_ALL:
            decode = cost.decoding_shards
        elif first.schedule.name == ALL_GATHER:
            decode = cost.decoding(first.group.size, always=self._always_gathers)
        return cost.bucket.value + cost.encode.value * elements, decode * elements


def assumed_of_codec(precision: Choice | None, machine: Machine) -> list[str]:
    """What had to be assumed of a compressor, in words."""
    if precision is None:
        return []
    timed = _timed_like(precision, machine)
    if timed is None:
        return ["compressors that weren't timed take 1 ns an element each way"]
    if _arguments(timed) <= _arguments(str(precision)):
        return []
    return ["compressors take as long as with the arguments that they were timed with"]


def codec_cost(precision: Choice | None, machine: Machine) -> CodecCost:
    """As measured for this choice, or else for the same compressor with other arguments."""
    if precision is None:
        return CodecCost()
    timed = _timed_like(precision, machine)
    return ASSUMED_CODEC if timed is None else machine.codecs[timed]


def _timed_like(precision: Choice, machine: Machine) -> str | None:
    """The compressor of this name that was timed with the most arguments in common."""
    own = _arguments(str(precision))
    same = [text for text in machine.codecs if PlanText.parse(text).preset.name == precision.name]
    return max(same, key=lambda text: len(own & _arguments(text)), default=None)


def _arguments(text: str) -> set[tuple[str, str]]:
    return {pair for pair in PlanText.parse(text).preset.arguments if pair[0] != "warmup"}


ASSUMED_CODEC = CodecCost(encode=FittedValue(1e-9, 0.5), decode=FittedValue(1e-9, 0.5))


def _buckets(plan: Plan, workload: Workload, catalog: Catalog) -> tuple[Bucket, ...]:
    limit = plan.settings.bucket
    if not catalog.is_native(plan) or limit != Settings().bucket:
        return workload.buckets(limit)
    first = workload.buckets(BACKEND_FIRST_BUCKET_SIZE)[0]
    others = tuple(tensor for tensor in workload.tensors if tensor not in first.tensors)
    if not others:
        return (first,)
    rest = replace(workload, tensors=others)
    ready = {t.name: b.ready_seconds for b in workload.buckets(Size(1)) for t in b.tensors}
    return (
        first,
        *(
            replace(
                bucket,
                index=bucket.index + 1,
                ready_seconds=max(ready[t.name] for t in bucket.tensors),
            )
            for bucket in rest.buckets(limit)
        ),
    )

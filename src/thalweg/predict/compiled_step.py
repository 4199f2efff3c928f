"""The chains of each rank at a step: its buckets, when they are ready, their rounds, and the codec
time before and after them.

They follow the engine: uncompressed rounds are submitted one by one, a compressed bucket is one
chain (encode, exchange, exchange again, decode). The backend has buckets of its own: the first
closes at 1 MiB unless the plan sets the bucket size.
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
    """Concurrent rounds after `codec` seconds of encoding or decoding."""

    codec: float
    rounds: tuple[Round, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """The communication stages of one bucket on one rank."""

    ready: float  # seconds since backward began
    stages: tuple[Stage, ...]
    decode: float  # seconds
    delay: int  # steps until the result is needed


class StepChains:
    def __init__(
        self, plan: Plan, group: Group, workload: Workload, machine: Machine, catalog: Catalog
    ) -> None:
        self.plan = plan
        self.cycle = cycle(plan, group, catalog)
        self.ranks = group.ranks
        self._group = group
        self._catalog = catalog
        self._cost, _ = codec_cost(plan.precision, machine)
        compressor = catalog.compressors[plan.precision.name] if plan.precision else None
        self._always_gathers = compressor is not None and not compressor.elementwise
        self._workload = workload
        self.buckets = _buckets(plan, workload, catalog)
        self._cached: dict[int, dict[int, tuple[Chain, ...]]] = {}

    def at(self, step: int) -> dict[int, tuple[Chain, ...]]:
        """The chains of every rank in order of submission, after the compressor's warm-up."""
        phase = step % self.cycle
        if phase not in self._cached:
            warm = -(-warm_up(self.plan) // self.cycle) * self.cycle
            rounds = list(self._rounds(warm + phase))
            self._cached[phase] = {rank: tuple(self._chains(rounds, rank)) for rank in self.ranks}
        return self._cached[phase]

    def _rounds(self, step: int) -> Iterator[Round]:
        """The rounds of the plan's buckets, or of the backend's own."""
        if not self._catalog.is_native(self.plan):
            yield from compile_rounds(self.plan, self._group, self._workload, step, self._catalog)
            return
        for bucket in self.buckets:
            alone = replace(self._workload, tensors=tuple(reversed(bucket.tensors)))
            whole = replace(self.plan, settings=Settings(bucket=Size(alone.nbytes + 1)))
            for round_ in compile_rounds(whole, self._group, alone, step, self._catalog):
                yield replace(round_, number=bucket.index, bucket=bucket.index)

    def _chains(self, rounds: Iterable[Round], rank: int) -> Iterator[Chain]:
        own = [r for r in rounds if rank in r.group.ranks]
        for index, of_bucket in groupby(own, key=lambda r: r.bucket):
            bucket, chain = self.buckets[index], list(of_bucket)
            inside_racks = (RACK_SUM_PAYLOAD, RESULT_PAYLOAD)
            if any(r.codec is not None or r.payload.name in inside_racks for r in chain):
                yield self._compressed(bucket, chain)
            else:
                for r in chain:
                    yield Chain(bucket.ready_seconds, (Stage(0.0, (r,)),), 0.0, r.delay)

    def _compressed(self, bucket: Bucket, rounds: Sequence[Round]) -> Chain:
        compressed = [r for r in rounds if r.codec is not None]
        inside = [r for r in rounds if r.payload.name == RACK_SUM_PAYLOAD]
        back = [r for r in rounds if r.payload.name == RESULT_PAYLOAD]
        beside = [r for r in rounds if r not in compressed and r not in inside and r not in back]
        encode, decode = self._codec_seconds(bucket, compressed)
        planned = (
            (0.0, inside),
            (encode, [*compressed[:1], *beside]),
            *((0.0, [round_]) for round_ in compressed[1:]),
            (decode, back),
        )
        stages = tuple(Stage(codec, tuple(together)) for codec, together in planned if together)
        return Chain(bucket.ready_seconds, stages, 0.0 if back else decode, rounds[0].delay)

    def _codec_seconds(self, bucket: Bucket, compressed: Sequence[Round]) -> tuple[float, float]:
        if not compressed:
            return 0.0, 0.0
        cost, elements, first = self._cost, bucket.elements, compressed[0]
        decode = cost.decode.value
        if first.schedule.name == ALL_TO_ALL:
            decode = cost.decoding_shards
        elif first.schedule.name == ALL_GATHER:
            decode = cost.decoding(first.group.size, always=self._always_gathers)
        return cost.bucket.value + cost.encode.value * elements, decode * elements


def codec_cost(precision: Choice | None, machine: Machine) -> tuple[CodecCost, list[str]]:
    """The codec cost measured for this choice, or for the same compressor with the most arguments
    in common, and what is assumed about its speed, in words."""
    if precision is None:
        return CodecCost(), []
    own = _arguments(str(precision))
    same = [text for text in machine.codecs if PlanText.parse(text).preset.name == precision.name]
    if not same:
        assumed = "compressors without measurement: 1 ns per element for encode and decode each"
        return ASSUMED_CODEC, [assumed]
    timed = max(same, key=lambda text: len(own & _arguments(text)))
    assumed = "compressors are as fast as with the arguments that were measured"
    return machine.codecs[timed], [] if _arguments(timed) <= own else [assumed]


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
    ready = {t.name: b.ready_seconds for b in workload.buckets(Size(1)) for t in b.tensors}
    rest = (
        replace(b, index=b.index + 1, ready_seconds=max(ready[t.name] for t in b.tensors))
        for b in replace(workload, tensors=others).buckets(limit)
    )
    return (first, *rest)

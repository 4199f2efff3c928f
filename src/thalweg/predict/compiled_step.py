"""The chains of each rank at a step with what they cost: when their buckets are ready, and the
codec time before and after their rounds.

The backend has buckets of its own: the first closes at 1 MiB unless the plan sets the bucket size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from thalweg.catalog import Catalog
from thalweg.facts import Bucket, CodecCost, FittedValue, Machine, Size, Workload
from thalweg.plan import Choice, Plan, PlanText, Settings
from thalweg.schedules import Group
from thalweg.steps import (
    DDP_FIRST_BUCKET,
    Chain,
    Stage,
    Work,
    compile_buckets,
    cycle,
    warm_up,
)


@dataclass(frozen=True, slots=True)
class PricedChain:
    """A chain of one rank. Of a payload that takes two shots, `decode` covers both."""

    chain: Chain
    ready: float  # seconds since backward began
    encode: float  # seconds
    decode: float  # seconds

    def codec_seconds(self, stage: Stage) -> float:
        """The codec's seconds before the rounds of this stage."""
        return {Work.ENCODE: self.encode, Work.DECODE: self.decode}.get(stage.work, 0.0)


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
        self._compressor = catalog.compressors[plan.precision.name] if plan.precision else None
        self.buckets = _buckets(plan, workload, catalog)
        self._cached: dict[int, dict[int, tuple[PricedChain, ...]]] = {}

    def at(self, step: int) -> dict[int, tuple[PricedChain, ...]]:
        """The chains of every rank in order of submission, after the compressor's warm-up."""
        phase = step % self.cycle
        if phase not in self._cached:
            warm = -(-warm_up(self.plan) // self.cycle) * self.cycle
            compiled = compile_buckets(
                self.plan, self._group, self.buckets, warm + phase, self._catalog
            )
            self._cached[phase] = {
                rank: tuple(map(self._priced, compiled.of(rank))) for rank in self.ranks
            }
        return self._cached[phase]

    def _priced(self, chain: Chain) -> PricedChain:
        bucket, encoded, cost = self.buckets[chain.bucket], chain.encoded, self._cost
        if not encoded or self._compressor is None:
            return PricedChain(chain, bucket.ready_seconds, 0.0, 0.0)
        decode = cost.decode.value
        if not self._compressor.summable:
            always = not self._compressor.elementwise
            gathered = cost.decoding(encoded[0].group.size, always=always)
            decode = cost.decoding_shards if len(encoded) > 1 else gathered
        return PricedChain(
            chain,
            bucket.ready_seconds,
            cost.bucket.value + cost.encode.value * bucket.elements,
            decode * bucket.elements,
        )


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
    first = workload.buckets(DDP_FIRST_BUCKET)[0]
    others = tuple(tensor for tensor in workload.tensors if tensor not in first.tensors)
    if not others:
        return (first,)
    ready = {t.name: b.ready_seconds for b in workload.buckets(Size(1)) for t in b.tensors}
    rest = (
        replace(b, index=b.index + 1, ready_seconds=max(ready[t.name] for t in b.tensors))
        for b in replace(workload, tensors=others).buckets(limit)
    )
    return (first, *rest)

"""When a compressor pays: arithmetic on what was measured, for N workers on links of one speed.

Steps take what `predict.observed` says, with messages that cost nothing but their bytes. Without
DDP's overlap a step takes backward + encode + decode + wire / speed, where `wire` are the bytes
that a worker sends, so a compressor that saves bytes pays below

    breakeven = (dense wire - wire) / (encode + decode).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from thalweg.catalog import default_catalog, parse_plan
from thalweg.compress import Compressor
from thalweg.declarations import Value
from thalweg.errors import PlanError
from thalweg.predict.closed_form import ddp_step
from thalweg.predict.closed_form.ddp_step import AlphaBetaNetwork, CodecTimes, SentPayload

MIN_SWEPT_BITS_PER_SECOND, SWEPT_DECADE_COUNT, SPEEDS_PER_DECADE_COUNT = 1e7, 4, 8
SWEPT_BITS_PER_SECOND = tuple(
    MIN_SWEPT_BITS_PER_SECOND * 10 ** (i / SPEEDS_PER_DECADE_COUNT)
    for i in range(SWEPT_DECADE_COUNT * SPEEDS_PER_DECADE_COUNT + 1)
)
"""Bits per second, from 10 Mbit/s to 100 Gbit/s."""
ONE_BYTE_PER_SECOND = AlphaBetaNetwork(0.0, 1.0)  # where seconds are bytes


class PayloadPattern(Enum):
    SUM = "sum"  # added up on the way, by a ring; also what goes uncompressed
    TWO_SHOT = "two-shot"
    ALL_GATHER = "all-gather"

    def sent(self, payload: float) -> SentPayload:
        gathers = self is PayloadPattern.ALL_GATHER
        return SentPayload(payload, ddp_step.all_gather if gathers else ddp_step.ring)

    def wire(self, payload: float, workers: int) -> float:
        """Bytes that each worker sends."""
        return self.sent(payload).collective(ONE_BYTE_PER_SECOND, payload, workers)


def at_all_speeds(step: ddp_step.UncompressedStep | ddp_step.CompressedStep) -> list[float]:
    """Seconds of a step at each of `SWEPT_BITS_PER_SECOND`."""
    return [step.seconds(AlphaBetaNetwork(0.0, speed / 8)) for speed in SWEPT_BITS_PER_SECOND]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionCost:
    """What compressing costs, beside a step without it."""

    dense: ddp_step.UncompressedStep
    exchange: PayloadPattern
    payload: float  # bytes of one worker
    exact: float  # bytes that go along uncompressed
    seconds: float  # to encode and decode

    @property
    def step(self) -> ddp_step.CompressedStep:
        return ddp_step.CompressedStep(
            compute=self.dense.compute,
            codec=CodecTimes(own=self.seconds),
            payloads=(self.exchange.sent(self.payload), PayloadPattern.SUM.sent(self.exact)),
            workers=self.dense.workers,
        )

    @property
    def wire(self) -> float:
        workers = self.dense.workers
        return self.exchange.wire(self.payload, workers) + PayloadPattern.SUM.wire(
            self.exact, workers
        )

    @property
    def ratio(self) -> float:
        return sum(self.dense.buckets) / (self.payload + self.exact)

    @property
    def breakeven(self) -> float | None:
        """Bits per second, against an uncompressed step without overlap; None: saves nothing."""
        saved = 8 * (dense_wire(self.dense) - self.wire)
        return saved / self.seconds if saved > 0 else None

    @property
    def pays_below(self) -> float:
        """Bits per second, against DDP; 0 where it never pays, inf where always."""
        return 8 * ddp_step.pays_below(self.dense, self.step, alpha=0.0)


def dense_wire(dense: ddp_step.UncompressedStep) -> float:
    """Bytes that each worker sends without compression."""
    return PayloadPattern.SUM.wire(sum(dense.buckets), dense.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A compressor with its arguments, as it was written."""

    text: str
    compressor: Compressor
    arguments: dict[str, Value]

    def exchange(self, workers: int) -> PayloadPattern:
        """As rounds are compiled where all links are alike: among two, two shots send as much as
        gathering, later."""
        if self.compressor.summable:
            return PayloadPattern.SUM
        shards = self.compressor.elementwise and workers > 2
        return PayloadPattern.TWO_SHOT if shards else PayloadPattern.ALL_GATHER


def method_of(text: str) -> Method:
    """PlanError if it can't be read, or there is none of this name."""
    plan = parse_plan(f"ring+{text}")
    precision = plan.precision
    if precision is None or plan.text.settings:
        raise PlanError(f"{text!r} is more than a compressor", "write it like powersgd(rank=2)")
    compressor = default_catalog().compressors[precision.name]
    return Method(text=text.strip(), compressor=compressor, arguments=dict(precision.arguments))


def all_methods() -> list[Method]:
    """Every compressor, as it is without arguments."""
    return [method_of(name) for name in default_catalog().compressors]

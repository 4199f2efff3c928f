"""The link speeds at which a compressor pays, from measured codec times, for N workers.

Step times are those of `predict.ddp_step`, with messages that cost only their bytes.
Without DDP's overlap a step takes backward + encode + decode + wire / speed, where `wire` are the
bytes that a worker sends, so a compressor that saves bytes pays below

    breakeven = (dense wire - wire) / (encode + decode).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from math import inf
from typing import Any

from thalweg.catalog import default_catalog, parse_plan
from thalweg.errors import PlanError
from thalweg.plan import Choice
from thalweg.predict.ddp_step import (
    AlphaBetaNetwork,
    DdpStep,
    SentPayload,
    all_gather,
    pays_below,
    ring,
)

MIN_SWEPT_BITS_PER_SECOND, SWEPT_DECADE_COUNT, SPEEDS_PER_DECADE_COUNT = 1e7, 4, 8
SWEPT_BITS_PER_SECOND = tuple(
    MIN_SWEPT_BITS_PER_SECOND * 10 ** (i / SPEEDS_PER_DECADE_COUNT)
    for i in range(SWEPT_DECADE_COUNT * SPEEDS_PER_DECADE_COUNT + 1)
)
"""From 10 Mbit/s to 100 Gbit/s."""
ONE_BYTE_PER_SECOND = AlphaBetaNetwork(0.0, 1.0)  # on which seconds are bytes


class PayloadPattern(Enum):
    SUM = "sum"  # reduced by a ring; also uncompressed payloads
    TWO_SHOT = "two-shot"
    ALL_GATHER = "all-gather"

    def sent(self, payload: float) -> SentPayload:
        gathers = self is PayloadPattern.ALL_GATHER
        return SentPayload(payload, all_gather if gathers else ring)


def wire_nbytes(payloads: Iterable[SentPayload], workers: int) -> float:
    """The bytes that each worker sends."""
    return sum(payload.seconds(ONE_BYTE_PER_SECOND, workers) for payload in payloads)


def at_all_speeds(step: DdpStep) -> list[float]:
    """The step time in seconds at each of `SWEPT_BITS_PER_SECOND`."""
    return [step.seconds(AlphaBetaNetwork(0.0, speed / 8)) for speed in SWEPT_BITS_PER_SECOND]


def derived_metrics(dense: DdpStep, step: DdpStep) -> dict[str, Any]:
    """The figures of a row that follow from the measured ones. The break-even rate is the one
    against a step without overlap, None if no bytes are saved; `pays` compares with DDP."""
    contributed, wire = _contributed(step), wire_nbytes(step.payloads, step.workers)
    saved = 8 * (dense_wire(dense) - wire)
    return {
        "payload_bytes": round(contributed),
        "ratio": _contributed(dense) / contributed,
        "wire_bytes": round(wire),
        "breakeven_gbps": saved / step.codec / 1e9 if saved > 0 else None,
        **pays_row(8 * pays_below(dense, step, alpha=0.0)),
        "step_seconds": at_all_speeds(step),
    }


def pays_row(bits_per_second: float) -> dict[str, Any]:
    """The rate below which compression pays, for JSON: 0 is never, inf always."""
    return {
        "pays": {0.0: "never", inf: "always"}.get(bits_per_second, "below"),
        "pays_below_gbps": bits_per_second / 1e9 if 0 < bits_per_second < inf else None,
    }


def dense_wire(dense: DdpStep) -> float:
    """The bytes that each worker sends without compression."""
    return wire_nbytes([SentPayload(_contributed(dense))], dense.workers)


def _contributed(step: DdpStep) -> float:
    return sum(payload.nbytes for payload in step.payloads)


def exchange_of(method: Choice, workers: int) -> PayloadPattern:
    """The exchange of a compressor that is compiled if all links are equal: with two workers, two
    shots send as much as an all-gather, and later."""
    compressor = default_catalog().compressors[method.name]
    if compressor.summable:
        return PayloadPattern.SUM
    shards = compressor.elementwise and workers > 2
    return PayloadPattern.TWO_SHOT if shards else PayloadPattern.ALL_GATHER


def method_of(text: str) -> Choice:
    """The compressor of a text; PlanError if the text is malformed or names none."""
    plan = parse_plan(f"ring+{text}")
    if plan.precision is None or plan.text.settings:
        raise PlanError(f"{text!r} is more than a compressor", "write it like powersgd(rank=2)")
    return plan.precision

"""When a compressor pays: arithmetic on what was measured, for N workers on links of one speed.

What a worker sends for a payload of S bytes:

    sum          2 (N-1)/N S    added up on the way, by a ring; also what goes uncompressed
    two-shot     2 (N-1)/N S    shards to who reduces them, and the reduced shards to all
    all-gather     (N-1)   S    everybody's payload to everybody

Without overlap a step takes backward + encode + decode + wire / speed, so a compressor that saves
bytes pays below

    breakeven = (dense wire - wire) / (encode + decode).

DDP hides most of what it sends behind backward, which that slows down by LAMBDA, all but the last
bucket (the model of Agarwal et al., MLSys 2022):

    max(LAMBDA backward, dense wire of the other buckets / speed) + that of the last bucket / speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

LAMBDA = 1.07  # how much longer backward takes while gradients are sent
SLOWEST, DECADES, IN_A_DECADE = 1e7, 4, 8
SPEEDS = tuple(SLOWEST * 10 ** (i / IN_A_DECADE) for i in range(DECADES * IN_A_DECADE + 1))
"""Bits per second, from 10 Mbit/s to 100 Gbit/s."""


class Exchange(Enum):
    SUM = "sum"
    TWO_SHOT = "two-shot"
    ALL_GATHER = "all-gather"

    def wire(self, payload: float, workers: int) -> float:
        """Bytes that each worker sends."""
        if self is Exchange.ALL_GATHER:
            return (workers - 1) * payload
        return 2 * (workers - 1) / workers * payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A step without compression, bucket by bucket."""

    buckets: Sequence[int]  # bytes, in the order in which they are sent
    workers: int
    backward: float  # seconds

    @property
    def wire(self) -> float:
        return Exchange.SUM.wire(sum(self.buckets), self.workers)

    @property
    def last_wire(self) -> float:
        return Exchange.SUM.wire(self.buckets[-1], self.workers)

    def step(self, speed: float) -> float:
        """Seconds at so many bits per second, sent while backward goes on."""
        hidden = 8 * (self.wire - self.last_wire) / speed
        return max(LAMBDA * self.backward, hidden) + 8 * self.last_wire / speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """A step that compresses when backward is over, and sends then."""

    dense: Dense
    exchange: Exchange
    payload: float  # bytes of one worker
    exact: float  # bytes that go along uncompressed
    seconds: float  # to encode and decode

    @property
    def wire(self) -> float:
        workers = self.dense.workers
        return self.exchange.wire(self.payload, workers) + Exchange.SUM.wire(self.exact, workers)

    @property
    def ratio(self) -> float:
        return sum(self.dense.buckets) / (self.payload + self.exact)

    @property
    def breakeven(self) -> float | None:
        """Bits per second, against an uncompressed step without overlap; None: saves nothing."""
        saved = 8 * (self.dense.wire - self.wire)
        return saved / self.seconds if saved > 0 else None

    def step(self, speed: float) -> float:
        return self.dense.backward + self.seconds + 8 * self.wire / speed

    @property
    def pays_below(self) -> float:
        """Bits per second, against DDP; 0 where it never pays, inf where always.

        In x = 1 / speed, DDP's step is max(LAMBDA b, h x) + l x and this one b + c + w x: two
        straight pieces and one, so it pays beyond the root on the steep piece, or, if that lies
        before the corner, on the flat one."""
        b, c = self.dense.backward, self.seconds
        last, wire = 8 * self.dense.last_wire, 8 * self.wire
        hidden = 8 * self.dense.wire - last
        if hidden + last <= wire:
            return 0.0
        steep = (b + c) / (hidden + last - wire)
        if hidden * steep >= LAMBDA * b:
            return 1 / steep
        ahead = c - (LAMBDA - 1) * b  # of DDP at any speed
        return (last - wire) / ahead if last > wire and ahead > 0 else inf

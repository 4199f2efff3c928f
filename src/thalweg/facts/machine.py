"""Measured software costs of the hosts: what a message, a byte and a codec cost there while all of
their ranks are busy.

Two transports cross a network: Thalweg's own, and the backend's collectives. On each, a message
keeps its receiver busy for some time besides its bytes, and a rank handles a limited number of
bytes per second. Flows that share a link don't get all of its rate: TCP loses some of it to queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log


@dataclass(frozen=True, slots=True)
class FittedValue:
    """A fitted figure with its relative standard deviation."""

    value: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportCosts:
    """The costs of one transport, in seconds. `message` keeps a receiver busy besides its bytes,
    `byte` is for each one that a rank sends or receives. `crowding` pairs a number of flows on a
    link with the share of its rate that they get together, interpolated by their logarithm. `drag`
    is the slowdown of a schedule, by name, beyond what all of that explains."""

    message: FittedValue = FittedValue(0.0)
    byte: FittedValue = FittedValue(0.0)
    crowding: tuple[tuple[int, FittedValue], ...] = ((1, FittedValue(1.0)),)
    drag: tuple[tuple[str, FittedValue], ...] = ()

    def slowdown_of(self, schedule: str) -> FittedValue:
        return dict(self.drag).get(schedule, FittedValue(1.0))

    def bandwidth_share(self, flows: int) -> float:
        """The share of a link's rate that this many simultaneous flows get together."""
        number, share = self.crowding[0][0], self.crowding[0][1].value
        for more, figure in self.crowding[1:]:
            if flows <= number:
                break
            if flows < more:
                fraction = log(flows / number) / log(more / number)
                return share + fraction * (figure.value - share)
            number, share = more, figure.value
        return share


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """The seconds that a compressor takes while all ranks of a machine use it: for each bucket
    whatever its size, for each element, for each element of the result, and for each element of
    each payload where payloads are gathered."""

    bucket: FittedValue = FittedValue(0.0)
    encode: FittedValue = FittedValue(0.0)
    decode: FittedValue = FittedValue(0.0)
    gathered: FittedValue = FittedValue(0.0)

    def decoding(self, payloads: int, *, always: bool) -> float:
        """The seconds per element where this many whole payloads are gathered. `always`: the codec
        has no other exchange, so `decode` is what it costs besides."""
        return payloads * self.gathered.value + (self.decode.value if always else 0.0)

    @property
    def decoding_shards(self) -> float:
        """The seconds per element of a two-shot exchange: everybody's shards, then their sums. If
        only gathering was measured, that is two payloads."""
        return self.decode.value or 2 * self.gathered.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The software costs of machines. `burst`: bytes that an idle link carries at once. `codecs`
    are by their text in a plan, as in `powersgd(rank=4)`. `contention`: the share of a codec's
    seconds that backward loses while both run. `assumed` lists unmeasured figures."""

    ours: TransportCosts = TransportCosts()
    native: TransportCosts = TransportCosts()
    burst: float = 0.0
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    contention: float = 1.0
    assumed: tuple[str, ...] = field(default=(), compare=False)

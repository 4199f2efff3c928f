"""What is known of the machines that train, beside their links: what a message, a byte and a codec
cost there while all of their ranks are busy.

Two roads lead through a network: our own transport, and the backend's collectives. On a road, a
message costs its receiver some time besides its bytes, and a rank can handle so many bytes a
second. Where several flows share a link they don't get all of it: TCP loses some of it to queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log


@dataclass(frozen=True, slots=True)
class FittedValue:
    """A fitted figure, and its standard deviation relative to it."""

    value: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportCosts:
    """`crowding` are pairs: with so many flows on a link at once, they get this share of its rate
    together. Between two such numbers it goes with their logarithm. `drag` is by the schedule's
    name: it takes so many times as long as all of that explains."""

    message: FittedValue = FittedValue(
        0.0
    )  # seconds that a message keeps its receiver busy, besides bytes
    byte: FittedValue = FittedValue(
        0.0
    )  # seconds that a rank takes for each byte that it sends or takes in
    crowding: tuple[tuple[int, FittedValue], ...] = ((1, FittedValue(1.0)),)
    drag: tuple[tuple[str, FittedValue], ...] = ()

    def slowdown_of(self, schedule: str) -> FittedValue:
        return dict(self.drag).get(schedule, FittedValue(1.0))

    def bandwidth_share(self, flows: int) -> float:
        """Of a link's rate that so many flows at once get."""
        number, share = self.crowding[0][0], self.crowding[0][1].value
        for more, figure in self.crowding[1:]:
            if flows <= number:
                break
            if flows < more:
                way = log(flows / number) / log(more / number)
                return share + way * (figure.value - share)
            number, share = more, figure.value
        return share


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """Seconds of a compressor, all ranks of a machine being busy with it."""

    bucket: FittedValue = FittedValue(0.0)  # for each bucket, whatever its size
    encode: FittedValue = FittedValue(0.0)  # for each element
    decode: FittedValue = FittedValue(0.0)  # for each element of the result
    gathered: FittedValue = FittedValue(
        0.0
    )  # for each element of each payload, where payloads are gathered

    def decoding(self, payloads: int, *, always: bool) -> float:
        """Seconds for an element where so many whole payloads are gathered; `always`: this codec
        knows no other way, so `decode` is for what it does besides."""
        return payloads * self.gathered.value + (self.decode.value if always else 0.0)

    @property
    def decoding_shards(self) -> float:
        """The same in two shots: the shards of all, and then the shards' sums. Where only gathering
        was measured, that is two payloads."""
        return self.decode.value or 2 * self.gathered.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What machines cost beside their links. `burst`: bytes that a link carries at once
    after a rest. `codecs` are by their choice's text, as in `powersgd(rank=4)`. `contention`: the
    share of a codec's seconds that backward loses while both run. `assumed` lists what nobody
    measured."""

    ours: TransportCosts = TransportCosts()
    native: TransportCosts = TransportCosts()
    burst: float = 0.0
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    contention: float = 1.0
    assumed: tuple[str, ...] = field(default=(), compare=False)

"""Traffic shaping that gives an interface the rate, the delay and the loss of a link.

A token bucket (TBF) limits the rate. It holds at least 128 KB, because the kernel hands over up to
64 KB at a time, and splits that if two such units don't fit: at 32 KB throughput halves. So a
shorter burst after an idle time isn't delayed: don't time transfers below half a megabyte. At most
1 MB or 50 ms of packets queue behind the bucket, as in a switch; the rest is dropped and counted.

Delay and loss need netem in the kernel. A cut link drops all packets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from thalweg.errors import LabError
from thalweg.facts import Cluster, Link, Rate

Direction = Literal["out", "in"]
BOTH_DIRECTIONS: tuple[Direction, ...] = ("out", "in")
MIN_TOKEN_BUCKET_BYTES = 128 * 1024
TOKEN_BUCKET_SECONDS = 0.002  # at the link's rate; timers aren't more accurate
MIN_LINK_QUEUE_BYTES = 1_000_000
LINK_QUEUE_SECONDS = 0.05
MIN_LINK_RATE = Rate.parse("8kbit")
MAX_LINK_RATE = Rate.parse("34gbit")  # bytes per second are a 32-bit number
MAX_NETEM_PACKETS = 100_000  # in transit at once
ROOT_QDISC_HANDLE, INNER_QDISC_HANDLE = "1:", "2:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of one direction of a link; without a rate it is as fast as the machine."""

    rate: Rate | None = None
    delay: float = 0.0  # seconds
    loss: float = 0.0  # fraction of packets
    cut: bool = False

    def __post_init__(self) -> None:
        if self.rate is not None and not MIN_LINK_RATE <= self.rate <= MAX_LINK_RATE:
            raise LabError(
                f"the lab can't emulate a link of {self.rate}",
                f"give {MIN_LINK_RATE} to {MAX_LINK_RATE}",
            )

    @property
    def needs_netem(self) -> bool:
        return not self.cut and bool(self.delay or self.loss)


def declared(cluster: Cluster, *, loss: float, netem: bool) -> dict[Link, Shape]:
    """The declared shape of every link; uplinks have delay and loss only with netem."""
    rates = cluster.rates()
    shapes = {link: Shape(rate=rate) for link, rate in rates.items() if link.kind == "nic"}
    for rack in cluster.racks:
        for direction in BOTH_DIRECTIONS:
            link = Link("uplink", rack.name, direction)
            delay = rack.latency.seconds if netem else 0.0
            shapes[link] = Shape(rate=rates.get(link), delay=delay, loss=loss if netem else 0.0)
    return shapes


Qdisc = dict[str, Any]
"""Arguments for pyroute2's `tc`: `kind`, `handle`, `parent` unless it is the root, parameters."""


def qdiscs(shape: Shape) -> list[Qdisc]:
    """The queueing disciplines that implement this shape, from the root on."""
    if shape.cut:
        return [{"kind": "pfifo", "handle": ROOT_QDISC_HANDLE, "limit": 0}]
    chain: list[Qdisc] = []
    if shape.needs_netem:
        chain.append(
            {
                "kind": "netem",
                "handle": ROOT_QDISC_HANDLE,
                "delay": round(shape.delay * 1e6),
                "loss": 100 * shape.loss,
                "limit": MAX_NETEM_PACKETS,
            }
        )
    if shape.rate is not None:
        inner = {"handle": INNER_QDISC_HANDLE, "parent": f"{ROOT_QDISC_HANDLE}1"}
        rate = shape.rate.bits_per_second / 8
        chain.append(
            {
                "kind": "tbf",
                **(inner if chain else {"handle": ROOT_QDISC_HANDLE}),
                "rate": round(rate),
                "burst": max(MIN_TOKEN_BUCKET_BYTES, round(rate * TOKEN_BUCKET_SECONDS)),
                "limit": max(MIN_LINK_QUEUE_BYTES, round(rate * LINK_QUEUE_SECONDS)),
            }
        )
    return chain

"""How an interface is made as slow, as far away and as lossy as a link.

Rate by a token bucket (TBF): what leaves is held back once the bucket is empty. The bucket holds at
least 128 KB, because the kernel hands over up to 64 KB at a time, and cuts it up if two of these
don't fit: at 32 KB throughput halves. So what is shorter than that, after an idle moment, isn't
held back: time nothing below half a megabyte. Behind the bucket waits at most 1 MB or 50 ms, as in
a switch; what comes on top is dropped, and counted.

Delay and loss by netem, where the kernel has it. A link that is cut swallows what it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from thalweg.errors import LabError
from thalweg.facts import Cluster, Link, Rate

MIN_TOKEN_BUCKET_BYTES = 128 * 1024  # bytes, at least
TOKEN_BUCKET_SECONDS = 0.002  # ... and so long at the link's rate, since timers are late
MIN_LINK_QUEUE_BYTES = 1_000_000  # bytes, at least
LINK_QUEUE_SECONDS = 0.05
MIN_LINK_RATE = Rate.parse("8kbit")
MAX_LINK_RATE = Rate.parse("34gbit")  # bytes per second are a 32-bit number
MAX_NETEM_PACKETS = 100_000  # on their way at once, at most
ROOT_QDISC_HANDLE, INNER_QDISC_HANDLE = "1:", "2:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One direction of a link. Without a rate it is as fast as the machine."""

    rate: Rate | None = None
    delay: float = 0.0  # seconds
    loss: float = 0.0  # share of packets
    cut: bool = False

    def __post_init__(self) -> None:
        if self.rate is not None and not MIN_LINK_RATE <= self.rate <= MAX_LINK_RATE:
            raise LabError(
                f"a link of {self.rate} can't be had in the lab",
                f"give {MIN_LINK_RATE} to {MAX_LINK_RATE}",
            )

    @property
    def needs_netem(self) -> bool:
        return not self.cut and bool(self.delay or self.loss)


def declared(cluster: Cluster, *, loss: float, netem: bool) -> dict[Link, Shape]:
    """Every link as the cluster has it; delay and loss, which are the uplinks', only by netem."""
    rates = cluster.rates()
    shapes = {link: Shape(rate=rate) for link, rate in rates.items() if link.kind == "nic"}
    ways: tuple[Literal["out", "in"], ...] = ("out", "in")
    for rack in cluster.racks:
        for way in ways:
            link = Link("uplink", rack.name, way)
            shapes[link] = Shape(
                rate=rates.get(link),
                delay=rack.latency.seconds if netem else 0.0,
                loss=loss if netem else 0.0,
            )
    return shapes


Qdisc = dict[str, Any]
"""What pyroute2's `tc` takes: `kind`, `handle`, `parent` unless it is the root, parameters."""


def qdiscs(shape: Shape) -> list[Qdisc]:
    """The queueing disciplines that make this shape, from the root on."""
    if shape.cut:
        return [{"kind": "pfifo", "handle": ROOT_QDISC_HANDLE, "limit": 0}]
    found: list[Qdisc] = []
    if shape.needs_netem:
        found.append(
            {
                "kind": "netem",
                "handle": ROOT_QDISC_HANDLE,
                "delay": round(shape.delay * 1e6),
                "loss": 100 * shape.loss,
                "limit": MAX_NETEM_PACKETS,
            }
        )
    if shape.rate is not None:
        inner = (
            {"handle": INNER_QDISC_HANDLE, "parent": f"{ROOT_QDISC_HANDLE}1"}
            if found
            else {"handle": ROOT_QDISC_HANDLE}
        )
        found.append({"kind": "tbf", **inner, **_bucket(shape.rate)})
    return found


def _bucket(rate: Rate) -> dict[str, Any]:
    bytes_per_second = rate.bits_per_second / 8
    return {
        "rate": round(bytes_per_second),
        "burst": max(MIN_TOKEN_BUCKET_BYTES, round(bytes_per_second * TOKEN_BUCKET_SECONDS)),
        "limit": max(MIN_LINK_QUEUE_BYTES, round(bytes_per_second * LINK_QUEUE_SECONDS)),
    }

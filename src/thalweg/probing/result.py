"""The result of a probe: the cluster, and remarks on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Self

from thalweg.facts import Cluster, Duplex, Rate, about, format_cluster, parse_cluster
from thalweg.plan import TRANSPORT

SLOW_OUTLIER_RATIO = 0.6  # of the median rate
PROBED_RATE_DIGITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkFound:
    """The rates of an uplink in bits per second; lower bounds, if it wasn't `full`. Its
    oversubscription is the sum of its NICs' rates over its own."""

    rack: str
    out: float
    out_full: bool
    into: float
    into_full: bool
    oversubscription: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """All that a probe found. `measured`: the NICs' rates were; `round_trips` are in seconds, by
    host. `sureness` (sure, likely, guess, or declared) and `reason` are about the racks."""

    cluster: Cluster
    measured: bool
    round_trips: dict[str, float]
    uplinks: tuple[UplinkFound, ...]
    sureness: str
    reason: str
    outliers: tuple[str, ...]
    contradictions: tuple[str, ...]
    notes: tuple[str, ...]
    measurements: int
    seconds: float
    transport: str = TRANSPORT

    def packed(self) -> dict[str, Any]:
        """The fields as values for JSON."""
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "cluster": format_cluster(self.cluster),
            "uplinks": [asdict(uplink) for uplink in self.uplinks],
        }

    @classmethod
    def unpacked(cls, fields: dict[str, Any]) -> Self:
        """The result from `packed`; on rank 0 too, so that all ranks have the same."""
        lists = ("outliers", "contradictions", "notes")
        return cls(
            **{
                **fields,
                **{name: tuple(fields[name]) for name in lists},
                "cluster": parse_cluster(fields["cluster"]),
                "uplinks": tuple(UplinkFound(**uplink) for uplink in fields["uplinks"]),
            }
        )

    def file(self) -> str:
        """The cluster file, with remarks as comments."""
        remarks = [
            f"Measured over {self.transport} in {self.seconds:.0f} s; rates are payload that "
            "arrives.",
            f"Racks ({self.sureness}): {self.reason}.",
            *(f"{text}." for text in (*self.outliers, *self.contradictions, *self.notes)),
        ]
        return format_cluster(self.cluster, remarks)

    def rows(self) -> list[dict[str, Any]]:
        hosts = [
            {
                "kind": "host",
                "host": host.name,
                "rack": rack.name,
                "ranks": list(host.ranks),
                "nic_mbps": mbps(min(host.nic.out, host.nic.into)) if self.measured else None,
                "nic_out_mbps": mbps(host.nic.out) if self.measured else None,
                "nic_in_mbps": mbps(host.nic.into) if self.measured else None,
                "rtt_us": microseconds(self.round_trips.get(host.name)),
            }
            for rack in self.cluster.racks
            for host in rack.hosts
        ]
        uplinks = [
            {
                "kind": "uplink",
                "rack": uplink.rack,
                "out_mbps": mbps(Rate(uplink.out)) if uplink.out_full else None,
                "in_mbps": mbps(Rate(uplink.into)) if uplink.into_full else None,
                "out_at_least_mbps": mbps(Rate(uplink.out)),
                "in_at_least_mbps": mbps(Rate(uplink.into)),
                "oversubscription": uplink.oversubscription,
            }
            for uplink in self.uplinks
        ]
        return [*hosts, *uplinks]


def mbps(rate: Rate) -> float:
    return round(rate.bits_per_second / 1e6, PROBED_RATE_DIGITS)


def microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 1)


def rounded(bits_per_second: float) -> Rate:
    """The rate to three significant digits, as a person would write it."""
    return Rate(float(f"{bits_per_second:.{PROBED_RATE_DIGITS}g}"))


def outliers_of(cluster: Cluster) -> list[str]:
    """Texts on NICs and uplinks that are slower than the others."""
    nics = [(f"{host.name}'s NIC", host.nic) for host in cluster.hosts]
    uplinks = [(f"{rack.name}'s uplink", rack.uplink) for rack in cluster.racks if rack.uplink]
    return [*_slow(nics), *_slow(uplinks)]


def _slow(links: Sequence[tuple[str, Duplex]]) -> list[str]:
    found = []
    for name, duplex in links if len(links) > 2 else ():
        slow: dict[str, float] = {}  # times slower than the median, by direction
        rates = []
        for direction, rate, all_rates in (
            ("out", duplex.out, [other.out for _, other in links]),
            ("in", duplex.into, [other.into for _, other in links]),
        ):
            usual = median(other.bits_per_second for other in all_rates)
            if rate.bits_per_second < SLOW_OUTLIER_RATIO * usual:
                slow[direction] = usual / rate.bits_per_second
                rates.append(f"{about(rate.bits_per_second, 'bit/s')} {direction}")
        if slow:
            only = f" {next(iter(slow))}" if len(slow) == 1 else ""
            times = f"{max(slow.values()):.1f}x slower{only} than the others"
            found.append(f"{name} is {times} ({', '.join(rates)})")
    return found

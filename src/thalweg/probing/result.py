"""The result of a probe: the cluster, built from measurements of numbered hosts, and remarks on
it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Self

import numpy as np

from thalweg.facts import (
    Cluster,
    Duplex,
    Duration,
    Host,
    Rack,
    Rate,
    StragglerDelay,
    about,
    format_cluster,
    grouped,
    parse_cluster,
)
from thalweg.plan import TRANSPORT
from thalweg.probing.coordinator import HostInfo
from thalweg.probing.link_rates import Nics, Uplink

SLOW_OUTLIER_RATIO = 0.6  # of the median rate
PROBED_RATE_DIGITS = 3
_HOST_NAME_FORBIDDEN = re.compile(r"[^A-Za-z0-9._:-]+")
MIN_RACK_LATENCY_RATIO = 1.1  # of latency across racks to latency within; less is noise


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """All that a probe found. `measured`: the NICs' rates were; `round_trips` are in seconds, by
    host. `sureness` (sure, likely, guess, or declared) and `reason` are about the racks."""

    cluster: Cluster
    measured: bool
    round_trips: dict[str, float]
    uplinks: tuple[Uplink, ...] = ()
    sureness: str
    reason: str
    outliers: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
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
                "uplinks": tuple(Uplink(**uplink) for uplink in fields["uplinks"]),
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
        microseconds = {name: round(1e6 * t, 1) for name, t in self.round_trips.items()}
        hosts = [
            {
                "kind": "host",
                "host": host.name,
                "rack": rack.name,
                "ranks": list(host.ranks),
                "nic_mbps": mbps(min(host.nic.out, host.nic.into)) if self.measured else None,
                "nic_out_mbps": mbps(host.nic.out) if self.measured else None,
                "nic_in_mbps": mbps(host.nic.into) if self.measured else None,
                "rtt_us": microseconds.get(host.name),
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


def rounded(bits_per_second: float) -> Rate:
    """The rate to three significant digits, as a person would write it."""
    return Rate(float(f"{bits_per_second:.{PROBED_RATE_DIGITS}g}"))


def outliers_of(cluster: Cluster) -> list[str]:
    """Texts on NICs and uplinks that are slower than the others."""
    nics = [(f"{host.name}'s NIC", host.nic) for host in cluster.hosts]
    uplinks = [(f"{rack.name}'s uplink", rack.uplink) for rack in cluster.racks if rack.uplink]
    return [*_slow(nics), *_slow(uplinks)]


def _slow(links: Sequence[tuple[str, Duplex]]) -> list[str]:
    if len(links) < 3:
        return []
    rates = [{"out": d.out.bits_per_second, "in": d.into.bits_per_second} for _, d in links]
    medians = {side: median(each[side] for each in rates) for side in rates[0]}
    found = []
    for (name, _), own in zip(links, rates, strict=True):
        slow = [side for side, rate in own.items() if rate < SLOW_OUTLIER_RATIO * medians[side]]
        if slow:
            times = max(medians[side] / own[side] for side in slow)
            only = f" {slow[0]}" if len(slow) == 1 else ""
            shown = ", ".join(f"{about(own[side], 'bit/s')} {side}" for side in slow)
            found.append(f"{name} is {times:.1f}x slower{only} than the others ({shown})")
    return found


def names_of(hosts: Sequence[HostInfo], declared: Cluster | None) -> list[str]:
    """The declared names, or the hosts' own, made unique and valid for a cluster file."""
    if declared is not None:
        known = [declared.host(host.ranks[0]).name for host in hosts]
        if len({*known}) == len(known):
            return known
    plain = [_HOST_NAME_FORBIDDEN.sub("-", host.name).lstrip(".:-") or "host" for host in hosts]
    times = Counter(plain)
    numbered = [
        name if times[name] == 1 else f"{name}-{host.ranks[0]}"
        for name, host in zip(plain, hosts, strict=True)
    ]
    if len({*numbered}) < len(numbered):
        return [f"host{host.ranks[0]}" for host in hosts]
    return numbered


def cluster_of(
    infos: Sequence[HostInfo],
    names: Sequence[str],
    racks: Sequence[frozenset[int]],
    nics: Nics,
    uplinks: Sequence[Uplink | None],
    round_trips: dict[tuple[int, int], float],
    declared: Cluster | None,
) -> Cluster:
    within, added = added_by_uplinks(racks, round_trips)
    built = []
    for number, (rack, uplink) in enumerate(zip(racks, uplinks, strict=True)):
        hosts = tuple(
            Host(
                name=names[host],
                ranks=infos[host].ranks,
                nic=_duplex(nics.out[host], nics.into[host]),
                late=declared.host(infos[host].ranks[0]).late if declared else StragglerDelay(),
            )
            for host in sorted(rack)
        )
        name = declared.rack(infos[min(rack)].ranks[0]).name if declared else f"rack{number}"
        limit = _duplex(uplink.out, uplink.into) if uplink and uplink.limits else None
        latency = Duration(round(added[number], 7))
        built.append(Rack(name=name, hosts=hosts, uplink=limit, latency=latency))
    return Cluster(racks=tuple(built), latency=half(2 * within))


def _duplex(out: float, into: float) -> Duplex:
    return Duplex(rounded(out), rounded(into))


def half(round_trip: float) -> Duration:
    return Duration(round(round_trip / 2, 7))


def by_host(
    names: Sequence[str],
    racks: Sequence[frozenset[int]],
    round_trips: dict[tuple[int, int], float],
) -> dict[str, float]:
    """The median of each host's round trips within its rack, or of all that it has."""
    found = {}
    for rack in racks:
        for host in rack:
            own = {pair: t for pair, t in round_trips.items() if host in pair}
            within = [t for pair, t in own.items() if {*pair} <= rack]
            if own:
                found[names[host]] = median(within or own.values())
    return found


def added_by_uplinks(
    racks: Sequence[frozenset[int]], round_trips: Mapping[tuple[int, int], float]
) -> tuple[float, list[float]]:
    """The latency within a rack in seconds, and what crossing each rack's uplink adds to it.

    The latency from rack i to rack j is w + l_i + l_j, where w is that within a rack: least squares
    over the round trips between racks, none below 0."""
    rack_of = {host: number for number, rack in enumerate(racks) for host in rack}
    within = [t / 2 for (one, other), t in round_trips.items() if rack_of[one] == rack_of[other]]
    across = grouped(
        ((rack_of[one], rack_of[other]), seconds / 2)
        for (one, other), seconds in round_trips.items()
        if rack_of[one] != rack_of[other]
    )
    baseline = median(within) if within else min(min(times) for times in across.values())
    latencies = {pair: median(times) for pair, times in across.items()}
    if not latencies or median(latencies.values()) < MIN_RACK_LATENCY_RATIO * baseline:
        return baseline, [0.0 for _ in racks]
    matrix = np.zeros((len(latencies), len(racks)))
    for row, pair in enumerate(latencies):
        matrix[row, list(pair)] = 1.0
    excess = np.array([seconds - baseline for seconds in latencies.values()])
    solution = np.linalg.lstsq(matrix, excess, rcond=None)[0]
    return baseline, [max(0.0, float(value)) for value in solution]

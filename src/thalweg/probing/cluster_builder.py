"""From figures by the numbers of hosts to a cluster with names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from thalweg.facts import Cluster, Duplex, Duration, Host, Rack, StragglerDelay
from thalweg.probing.coordinator import HostInfo
from thalweg.probing.nics import Nics
from thalweg.probing.result import UplinkFound, rounded
from thalweg.probing.uplinks import Uplink

_HOST_NAME_FORBIDDEN = re.compile(r"[^A-Za-z0-9._:-]+")
MIN_RACK_LATENCY_RATIO = 1.1  # of a way across racks to one within, below which it is noise


def names_of(hosts: Sequence[HostInfo], declared: Cluster | None) -> list[str]:
    """As declared, or else the hosts' own names, made unique and such that a file can have them."""
    if declared is not None:
        own = [declared.host(host.ranks[0]).name for host in hosts]
        if len({*own}) == len(own):
            return own
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
    stations: Sequence[HostInfo],
    names: Sequence[str],
    racks: Sequence[frozenset[int]],
    nics: Nics,
    uplinks: Sequence[Uplink | None],
    trips: dict[tuple[int, int], float],
    declared: Cluster | None,
) -> Cluster:
    within, added = added_by_uplinks(racks, trips)
    built = []
    for number, rack in enumerate(racks):
        uplink = uplinks[number]
        hosts = [
            Host(
                name=names[host],
                ranks=stations[host].ranks,
                nic=Duplex(rounded(nics.out[host]), rounded(nics.into[host])),
                late=declared.host(stations[host].ranks[0]).late if declared else StragglerDelay(),
            )
            for host in sorted(rack)
        ]
        known = declared and declared.rack(stations[min(rack)].ranks[0]).name
        limits = uplink is not None and uplink.limits
        built.append(
            Rack(
                name=known or f"rack{number}",
                hosts=tuple(hosts),
                uplink=Duplex(rounded(uplink.out.rate), rounded(uplink.into.rate))
                if uplink is not None and limits
                else None,
                latency=Duration(round(added[number], 7)),
            )
        )
    return Cluster(racks=tuple(built), latency=half(2 * within))


def half(round_trip: float) -> Duration:
    return Duration(round(round_trip / 2, 7))


def by_host(
    names: Sequence[str], racks: Sequence[frozenset[int]], trips: dict[tuple[int, int], float]
) -> dict[str, float]:
    """The median of a host's round trips within its rack, or of all that it has."""
    found = {}
    for rack in racks:
        for host in rack:
            own = {pair: t for pair, t in trips.items() if host in pair}
            within = [t for pair, t in own.items() if {*pair} <= rack]
            if own:
                found[names[host]] = median(within or own.values())
    return found


def uplinks_found(
    cluster: Cluster,
    racks: Sequence[frozenset[int]],
    nics: Nics,
    uplinks: Sequence[Uplink | None],
) -> tuple[UplinkFound, ...]:
    found = []
    for rack, hosts, uplink in zip(cluster.racks, racks, uplinks, strict=True):
        if uplink is None:
            continue
        factors = [
            sum(rates[host] for host in hosts) / direction.rate
            for rates, direction in ((nics.out, uplink.out), (nics.into, uplink.into))
            if direction.full
        ]
        found.append(
            UplinkFound(
                rack=rack.name,
                out=uplink.out.rate,
                out_full=uplink.out.full,
                into=uplink.into.rate,
                into_full=uplink.into.full,
                oversubscription=round(max(factors), 2) if factors else None,
            )
        )
    return tuple(found)


def added_by_uplinks(
    racks: Sequence[frozenset[int]], trips: Mapping[tuple[int, int], float]
) -> tuple[float, list[float]]:
    """Seconds of the way within a rack, and what crossing each rack's uplink adds to it.

    A way from rack i to rack j takes w + l_i + l_j, where w is the way within a rack: least squares
    over the round trips between racks, none below 0."""
    rack_of = {host: number for number, rack in enumerate(racks) for host in rack}
    within = [t / 2 for (one, other), t in trips.items() if rack_of[one] == rack_of[other]]
    across: dict[tuple[int, int], list[float]] = {}
    for (one, other), seconds in trips.items():
        if rack_of[one] != rack_of[other]:
            across.setdefault((rack_of[one], rack_of[other]), []).append(seconds / 2)
    usual = median(within) if within else min(min(times) for times in across.values())
    ways = {pair: median(times) for pair, times in across.items()}
    if not ways or median(ways.values()) < MIN_RACK_LATENCY_RATIO * usual:
        return usual, [0.0 for _ in racks]
    matrix = np.zeros((len(ways), len(racks)))
    for row, pair in enumerate(ways):
        matrix[row, list(pair)] = 1.0
    excess = np.array([way - usual for way in ways.values()])
    solution = np.linalg.lstsq(matrix, excess, rcond=None)[0]
    return usual, [max(0.0, float(value)) for value in solution]

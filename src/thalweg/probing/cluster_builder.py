"""Building a `Cluster` with names from measurements of numbered hosts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from thalweg.facts import Cluster, Duplex, Duration, Host, Rack, StragglerDelay
from thalweg.probing.link_rates import Nics, Uplink
from thalweg.probing.network import HostInfo
from thalweg.probing.result import UplinkFound, rounded

_HOST_NAME_FORBIDDEN = re.compile(r"[^A-Za-z0-9._:-]+")
MIN_RACK_LATENCY_RATIO = 1.1  # of latency across racks to latency within; less is noise


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
        limit = _duplex(uplink.out.rate, uplink.into.rate) if uplink and uplink.limits else None
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
    racks: Sequence[frozenset[int]], round_trips: Mapping[tuple[int, int], float]
) -> tuple[float, list[float]]:
    """The latency within a rack in seconds, and what crossing each rack's uplink adds to it.

    The latency from rack i to rack j is w + l_i + l_j, where w is that within a rack: least squares
    over the round trips between racks, none below 0."""
    rack_of = {host: number for number, rack in enumerate(racks) for host in rack}
    within = [t / 2 for (one, other), t in round_trips.items() if rack_of[one] == rack_of[other]]
    across: dict[tuple[int, int], list[float]] = {}
    for (one, other), seconds in round_trips.items():
        if rack_of[one] != rack_of[other]:
            across.setdefault((rack_of[one], rack_of[other]), []).append(seconds / 2)
    usual = median(within) if within else min(min(times) for times in across.values())
    latencies = {pair: median(times) for pair, times in across.items()}
    if not latencies or median(latencies.values()) < MIN_RACK_LATENCY_RATIO * usual:
        return usual, [0.0 for _ in racks]
    matrix = np.zeros((len(latencies), len(racks)))
    for row, pair in enumerate(latencies):
        matrix[row, list(pair)] = 1.0
    excess = np.array([seconds - usual for seconds in latencies.values()])
    solution = np.linalg.lstsq(matrix, excess, rcond=None)[0]
    return usual, [max(0.0, float(value)) for value in solution]

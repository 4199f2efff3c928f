"""A whole probe, in order: round trips, racks, NICs, uplinks; and the cluster that results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from random import Random
from statistics import median
from time import monotonic

from thalweg.facts import Cluster, Duplex, Duration, Host, Rack
from thalweg.probing.conductor import Conductor, Station
from thalweg.probing.contradictions import rack_contradictions, rate_contradictions
from thalweg.probing.crossing import added_by_uplinks
from thalweg.probing.inference import Racks, infer_racks
from thalweg.probing.nics import Nics, measure_nics
from thalweg.probing.result import Probed, UplinkFound, outliers_of, rounded
from thalweg.probing.uplinks import Uplink, measure_uplinks

SEED = 7
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:-]+")


def survey(conductor: Conductor, declared: Cluster | None, transport: str, start: float) -> Probed:
    """On rank 0. Declared racks are kept, and what contradicts them is told."""
    if conductor.size == 1:
        return _alone(conductor, declared, transport, start)
    ranks = [station.ranks[0] for station in conductor.stations]
    names = names_of(conductor.stations, declared)
    inferred = infer_racks(conductor, Random(SEED))
    racks = inferred.racks if declared is None else _declared_racks(declared, ranks)
    trips = _round_trips(conductor, racks, inferred)
    nics = measure_nics(conductor, racks)
    uplinks = measure_uplinks(conductor, racks, nics)
    cluster = _cluster(conductor.stations, names, racks, nics, uplinks, trips, declared)
    contradictions: list[str] = []
    if declared is not None:
        contradictions = [
            *_host_contradictions(declared, conductor.stations),
            *rack_contradictions(declared, inferred, names, ranks),
            *rate_contradictions(declared, cluster),
        ]
    return Probed(
        cluster=cluster,
        measured=True,
        round_trips=_by_host(names, racks, trips),
        uplinks=_uplinks_found(cluster, racks, nics, uplinks),
        sureness=inferred.sureness if declared is None else "declared",
        reason=inferred.reason if declared is None else _compared(inferred, contradictions),
        outliers=tuple(outliers_of(cluster)),
        contradictions=tuple(contradictions),
        notes=tuple(_notes(racks, uplinks)),
        transport=transport,
        measurements=conductor.measurements,
        seconds=monotonic() - start,
    )


def _alone(conductor: Conductor, declared: Cluster | None, transport: str, start: float) -> Probed:
    """One host: no link to measure, only how long its ranks take to reach each other."""
    [station] = conductor.stations
    ranks = station.ranks
    note = "there is one worker, and nothing to measure"
    cluster = declared or Cluster(
        racks=(Rack(name="rack0", hosts=(Host(name=names_of([station], None)[0], ranks=ranks),)),)
    )
    trips = {}
    if len(ranks) > 1:
        note = "all workers are on one host: there are no links to measure, and its NIC is assumed"
        seconds = conductor.round_trip_of_ranks(ranks[0], ranks[-1])
        trips = dict.fromkeys((host.name for host in cluster.hosts), seconds)
        if declared is None:
            cluster = Cluster(racks=cluster.racks, latency=_half(seconds))
    return Probed(
        cluster=cluster,
        measured=False,
        round_trips=trips,
        uplinks=(),
        sureness="sure" if declared is None else "declared",
        reason="one host is one rack",
        outliers=(),
        contradictions=tuple(_host_contradictions(declared, [station]) if declared else ()),
        notes=(note,),
        transport=transport,
        measurements=conductor.measurements,
        seconds=monotonic() - start,
    )


def names_of(stations: Sequence[Station], declared: Cluster | None) -> list[str]:
    """As declared, or else the hosts' own names, made unique and such that a file can have them."""
    if declared is not None:
        own = [declared.host(station.ranks[0]).name for station in stations]
        if len({*own}) == len(own):
            return own
    plain = [_NOT_IN_NAMES.sub("-", station.name).lstrip(".:-") or "host" for station in stations]
    times = Counter(plain)
    return [
        name if times[name] == 1 else f"{name}-{station.ranks[0]}"
        for name, station in zip(plain, stations, strict=True)
    ]


def _declared_racks(declared: Cluster, ranks: Sequence[int]) -> list[frozenset[int]]:
    racks: dict[str, set[int]] = {}
    for host, rank in enumerate(ranks):
        racks.setdefault(declared.rack(rank).name, set()).add(host)
    return [frozenset(rack) for rack in racks.values()]


def _round_trips(
    conductor: Conductor, racks: Sequence[frozenset[int]], inferred: Racks
) -> dict[tuple[int, int], float]:
    """Those that were taken anyway, and of every host with another of its rack."""
    trips = dict(inferred.round_trips)
    for rack in racks:
        first, *others = sorted(rack)
        for other in others:
            if (first, other) not in trips:
                trips[first, other] = conductor.round_trip(first, other)
    return trips


def _by_host(
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


def _cluster(
    stations: Sequence[Station],
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
                **({"late": declared.host(stations[host].ranks[0]).late} if declared else {}),
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
    return Cluster(racks=tuple(built), latency=_half(2 * within))


def _half(round_trip: float) -> Duration:
    return Duration(round(round_trip / 2, 7))


def _uplinks_found(
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
            sum(rates[host] for host in hosts) / way.rate
            for rates, way in ((nics.out, uplink.out), (nics.into, uplink.into))
            if way.full
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


def _notes(racks: Sequence[frozenset[int]], uplinks: Sequence[Uplink | None]) -> list[str]:
    full = [uplink for uplink in uplinks if uplink is not None and uplink.limits]
    notes = []
    if len(racks) == 2 and full:
        notes.append("with two racks, the way out of one can't be told from the way into the other")
    if len(racks) > 1 and not full:
        notes.append("no uplink is a bottleneck: racks don't matter for rates")
    return notes


def _compared(inferred: Racks, contradictions: Sequence[str]) -> str:
    if inferred.told is None:
        return f"as declared; {inferred.reason}"
    said = "contradicted" if any("declared in" in text for text in contradictions) else "confirmed"
    return f"as declared, and {said} by {inferred.told}"


def _host_contradictions(declared: Cluster, stations: Sequence[Station]) -> list[str]:
    told = []
    for station in stations:
        said = {declared.host(rank).name for rank in station.ranks}
        if len(said) > 1:
            told.append(f"{' and '.join(sorted(said))} are declared, but are one host")
    host_of = {rank: station for station in stations for rank in station.ranks}
    for host in declared.hosts:
        if len({host_of[rank].ranks for rank in host.ranks}) > 1:
            told.append(f"the ranks of {host.name} are declared on one host, but are on several")
    return told

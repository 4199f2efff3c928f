"""A whole probe, in order: round trips, racks, NICs, uplinks; and the cluster that results.

Where what was declared and what was measured don't go together, that is told in words. What is
declared about racks holds all the same: measurements can't see everything, and who declared it may
know better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random
from time import monotonic
from typing import Protocol

from thalweg.facts import Cluster, Duplex, Host, Rack, about
from thalweg.probing.cluster_builder import by_host, cluster_of, half, names_of, uplinks_found
from thalweg.probing.coordinator import HostInfo
from thalweg.probing.network import Network
from thalweg.probing.nics import measure_nics
from thalweg.probing.racks import InferredRacks, infer_racks
from thalweg.probing.result import ProbeResult, outliers_of
from thalweg.probing.uplinks import Uplink, measure_uplinks

RACK_SEARCH_SEED = 7
PLAUSIBLE_RATE_RATIOS = (0.8, 1.15)  # measured over declared; payload is 0.956 of a link's rate
MAX_LISTED_MISMATCHES = 8  # that are told in full


class NetworkOfHosts(Network, Protocol):
    """A network whose hosts have names and ranks."""

    @property
    def host_infos(self) -> Sequence[HostInfo]: ...

    @property
    def measurements(self) -> int: ...

    def round_trip_of_ranks(self, one: int, other: int) -> float: ...


def survey(network: NetworkOfHosts, declared: Cluster | None, start: float) -> ProbeResult:
    """On rank 0. Declared racks are kept, and what contradicts them is told."""
    if network.size == 1:
        return _alone(network, declared, start)
    ranks = [host.ranks[0] for host in network.host_infos]
    names = names_of(network.host_infos, declared)
    inferred = infer_racks(network, Random(RACK_SEARCH_SEED))
    racks = inferred.racks if declared is None else declared_racks(declared, ranks)
    trips = _round_trips(network, racks, inferred)
    nics = measure_nics(network, racks)
    uplinks = measure_uplinks(network, racks, nics)
    cluster = cluster_of(network.host_infos, names, racks, nics, uplinks, trips, declared)
    contradictions: list[str] = []
    if declared is not None:
        contradictions = [
            *_host_contradictions(declared, network.host_infos),
            *rack_contradictions(declared, inferred, names, ranks),
            *rate_contradictions(declared, cluster),
        ]
    return ProbeResult(
        cluster=cluster,
        measured=True,
        round_trips=by_host(names, racks, trips),
        uplinks=uplinks_found(cluster, racks, nics, uplinks),
        sureness=inferred.sureness if declared is None else "declared",
        reason=inferred.reason if declared is None else _compared(inferred, contradictions),
        outliers=tuple(outliers_of(cluster)),
        contradictions=tuple(contradictions),
        notes=tuple(_notes(racks, uplinks)),
        measurements=network.measurements,
        seconds=monotonic() - start,
    )


def _alone(network: NetworkOfHosts, declared: Cluster | None, start: float) -> ProbeResult:
    """One host: no link to measure, only how long its ranks take to reach each other."""
    [station] = network.host_infos
    ranks = station.ranks
    note = "there is one worker, and nothing to measure"
    cluster = declared or in_one_rack([station])
    trips = {}
    if len(ranks) > 1:
        note = "all workers are on one host: there are no links to measure, and its NIC is assumed"
        seconds = network.round_trip_of_ranks(ranks[0], ranks[-1])
        trips = dict.fromkeys((host.name for host in cluster.hosts), seconds)
        if declared is None:
            cluster = Cluster(racks=cluster.racks, latency=half(seconds))
    return ProbeResult(
        cluster=cluster,
        measured=False,
        round_trips=trips,
        uplinks=(),
        sureness="sure" if declared is None else "declared",
        reason="one host is one rack",
        outliers=(),
        contradictions=tuple(_host_contradictions(declared, [station]) if declared else ()),
        notes=(note,),
        measurements=network.measurements,
        seconds=monotonic() - start,
    )


def in_one_rack(stations: Sequence[HostInfo]) -> Cluster:
    names = names_of(stations, None)
    hosts = (Host(name=name, ranks=host.ranks) for name, host in zip(names, stations, strict=True))
    return Cluster(racks=(Rack(name="rack0", hosts=tuple(hosts)),))


def declared_racks(declared: Cluster, ranks: Sequence[int]) -> list[frozenset[int]]:
    """The hosts of each, by their number among those that `ranks` speak for."""
    racks: dict[str, set[int]] = {}
    for host, rank in enumerate(ranks):
        racks.setdefault(declared.rack(rank).name, set()).add(host)
    return [frozenset(rack) for rack in racks.values()]


def _round_trips(
    network: NetworkOfHosts, racks: Sequence[frozenset[int]], inferred: InferredRacks
) -> dict[tuple[int, int], float]:
    """Those that were taken anyway, and of every host with another of its rack."""
    trips = dict(inferred.round_trips)
    for rack in racks:
        first, *others = sorted(rack)
        for other in others:
            if (first, other) not in trips:
                trips[first, other] = network.round_trip(first, other)
    return trips


def _notes(racks: Sequence[frozenset[int]], uplinks: Sequence[Uplink | None]) -> list[str]:
    full = [uplink for uplink in uplinks if uplink is not None and uplink.limits]
    notes = []
    if len(racks) == 2 and full:
        notes.append("with two racks, the way out of one can't be told from the way into the other")
    if len(racks) > 1 and not full:
        notes.append("no uplink is a bottleneck: racks don't matter for rates")
    return notes


def _compared(inferred: InferredRacks, contradictions: Sequence[str]) -> str:
    if inferred.inferred_by is None:
        return f"as declared; {inferred.reason}"
    said = "contradicted" if any("declared in" in text for text in contradictions) else "confirmed"
    return f"as declared, and {said} by {inferred.inferred_by}"


def _host_contradictions(declared: Cluster, hosts: Sequence[HostInfo]) -> list[str]:
    told = []
    for station in hosts:
        said = {declared.host(rank).name for rank in station.ranks}
        if len(said) > 1:
            told.append(f"{' and '.join(sorted(said))} are declared, but are one host")
    host_of = {rank: station for station in hosts for rank in station.ranks}
    for host in declared.hosts:
        if len({host_of[rank].ranks for rank in host.ranks}) > 1:
            told.append(f"the ranks of {host.name} are declared on one host, but are on several")
    return told


def rack_contradictions(
    declared: Cluster, found: InferredRacks, names: list[str], ranks: list[int]
) -> list[str]:
    """Hosts by their number in `found`, and as the declaration has them by a rank."""
    if found.inferred_by is None:
        return []
    shares = "share an uplink" if found.inferred_by == "rates" else "are near each other"
    rack_of = {host: number for number, rack in enumerate(found.racks) for host in rack}
    told = []
    for one, other in combinations(range(len(names)), 2):
        together = declared.rack(ranks[one]) is declared.rack(ranks[other])
        if together and rack_of[one] != rack_of[other]:
            rack = declared.rack(ranks[one]).name
            told.append(
                f"{names[one]} and {names[other]} are declared in {rack}, but by "
                f"{found.inferred_by} they don't {shares}"
            )
        elif not together and rack_of[one] == rack_of[other]:
            told.append(
                f"{names[one]} and {names[other]} are declared in different racks, but by "
                f"{found.inferred_by} they {shares}"
            )
    more = len(told) - MAX_LISTED_MISMATCHES
    return (
        told
        if more <= 0
        else [*told[:MAX_LISTED_MISMATCHES], f"and so for {more} pairs of hosts more"]
    )


def rate_contradictions(declared: Cluster, measured: Cluster) -> list[str]:
    """Links that are far slower or faster than declared."""
    nics = {host.ranks[0]: host for host in measured.hosts}
    told: list[str] = []
    if not any("NIC" in text for text in declared.assumed):
        for host in declared.hosts:
            if host.ranks[0] in nics:
                told += _off(f"{host.name}'s NIC", host.nic, nics[host.ranks[0]].nic)
    uplinks = {rack.name: rack.uplink for rack in measured.racks}
    for rack in declared.racks:
        found = uplinks.get(rack.name)
        if rack.uplink is not None and found is not None:
            told += _off(f"{rack.name}'s uplink", rack.uplink, found)
    return told


def _off(name: str, declared: Duplex, measured: Duplex) -> Iterator[str]:
    for way, said, found in (
        ("out", declared.out, measured.out),
        ("in", declared.into, measured.into),
    ):
        ratio = found.bits_per_second / said.bits_per_second
        if not PLAUSIBLE_RATE_RATIOS[0] <= ratio <= PLAUSIBLE_RATE_RATIOS[1]:
            yield (
                f"{name} is declared {said} {way}, but {about(found.bits_per_second, 'bit/s')} "
                "was measured"
            )

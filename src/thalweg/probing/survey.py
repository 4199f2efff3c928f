"""A whole probe: round trips, racks, NICs and uplinks, in this order, and the resulting cluster.

Contradictions between what was declared and what was measured are reported in words. Declared racks
are kept all the same: measurements can't see everything, and the user may know better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

from thalweg.catalog import SETTING_PARAMETERS, refuse_retired
from thalweg.errors import UsageError
from thalweg.facts import Cluster, Duplex, Duration, Host, Rack, about, grouped, read_cluster
from thalweg.members.world import World
from thalweg.probing.coordinator import Effort, HostInfo, ProbeCoordinator, run_coordinated
from thalweg.probing.link_rates import measure_nics, measure_uplinks
from thalweg.probing.racks import InferredRacks, infer_racks
from thalweg.probing.result import ProbeResult, by_host, cluster_of, half, names_of, outliers_of

MEASUREMENTS_PER_HOST = 11  # about; for the progress bar
RACK_SEARCH_SEED = 7
PLAUSIBLE_RATE_RATIOS = (0.8, 1.15)  # measured over declared; payload is 0.956 of a link's rate
MAX_LISTED_MISMATCHES = 8  # pairs of hosts that are reported one by one
Progress = Callable[[int, int], None]
"""Called with the number of measurements done, and about how many there will be."""


def probe(
    cluster: Cluster | str | Path | None = None,
    *,
    transport: str = "tcp",
    timeout: str | float = "30s",
) -> Cluster:
    """The cluster as all workers together measure it; every rank gets the same one.

    cluster    racks that are known already (a `Cluster` or its file): they are kept, with what was
               measured about them
    transport  the transport to measure with: there is one
    timeout    how long to wait for another worker beyond the duration of a measurement

    Call it under torchrun, `thalweg run` and other launchers, or after init_process_group.
    `measure` returns all that was found, not only the cluster.
    """
    refuse_other_transports(transport)
    return measure(cluster, timeout=timeout).cluster


def measure(
    cluster: Cluster | str | Path | None = None,
    *,
    timeout: str | float = "30s",
    progress: Progress = lambda done, total: None,
) -> ProbeResult:
    """Measure the cluster like `probe`, and return all that was found."""
    seconds = Duration.parse(timeout).seconds if isinstance(timeout, str) else float(timeout)
    declared = read_cluster(Path(cluster)) if isinstance(cluster, str | Path) else cluster
    world = World.join(seconds)
    abort_flag, start = world.abort_flag(), monotonic()

    def counted(done: int) -> None:
        progress(done, max(done + 1, MEASUREMENTS_PER_HOST * world.size))

    def survey_all(coordinator: ProbeCoordinator) -> dict[str, Any]:
        return survey(coordinator, declared, start).packed()

    try:
        if declared is not None and declared.workers != world.size:
            raise UsageError(
                f"the cluster has {declared.workers} workers, and {world.size} were started",
                "start as many as it has, or describe those that were started",
            )
        result = run_coordinated(world, abort_flag, Effort(), survey_all, counted)
        return ProbeResult.unpacked(result)
    except BaseException as error:
        raise abort_flag.publish_error(error) from None


def refuse_other_transports(name: str) -> None:
    refuse_retired(name)
    if name not in SETTING_PARAMETERS["transport"].choices:
        raise UsageError(f"there is no transport {name!r}", "leave it out")


def survey(network: ProbeCoordinator, declared: Cluster | None, start: float) -> ProbeResult:
    """Measure the network on rank 0; declared racks are kept, and contradictions reported."""
    if network.size == 1:
        return _one_host(network, declared, start)
    ranks = [host.ranks[0] for host in network.host_infos]
    names = names_of(network.host_infos, declared)
    inferred = infer_racks(network, Random(RACK_SEARCH_SEED))
    racks = inferred.racks if declared is None else declared_racks(declared, ranks)
    round_trips = _round_trips(network, racks, inferred)
    nics = measure_nics(network, racks)
    uplinks = measure_uplinks(network, racks, nics)
    cluster = cluster_of(network.host_infos, names, racks, nics, uplinks, round_trips, declared)
    contradictions: list[str] = []
    if declared is not None:
        contradictions = [
            *_host_contradictions(declared, network.host_infos),
            *_rack_contradictions(declared, inferred, names, ranks),
            *_rate_contradictions(declared, cluster),
        ]
    full = any(uplink is not None and uplink.limits for uplink in uplinks)
    notes = []
    if len(racks) == 2 and full:
        notes.append("with two racks, the way out of one can't be told from the way into the other")
    elif len(racks) > 1 and not full:
        notes.append("no uplink is a bottleneck: racks don't matter for rates")
    reason = inferred.reason
    if declared is not None and inferred.inferred_by is None:
        reason = f"as declared; {reason}"
    elif declared is not None:
        differ = any("declared in" in text for text in contradictions)
        outcome = "contradicted" if differ else "confirmed"
        reason = f"as declared, and {outcome} by {inferred.inferred_by}"
    return ProbeResult(
        cluster=cluster,
        measured=True,
        round_trips=by_host(names, racks, round_trips),
        uplinks=tuple(
            replace(uplink, rack=rack.name)
            for rack, uplink in zip(cluster.racks, uplinks, strict=True)
            if uplink is not None
        ),
        sureness=inferred.sureness if declared is None else "declared",
        reason=reason,
        outliers=tuple(outliers_of(cluster)),
        contradictions=tuple(contradictions),
        notes=tuple(notes),
        measurements=network.measurements,
        seconds=monotonic() - start,
    )


def _one_host(network: ProbeCoordinator, declared: Cluster | None, start: float) -> ProbeResult:
    """The result for one host: only the round trip between its ranks is measured."""
    [host] = network.host_infos
    note = "there is one worker, and nothing to measure"
    cluster = declared or in_one_rack([host])
    round_trips = {}
    if len(host.ranks) > 1:
        note = "all workers are on one host: there are no links to measure, and its NIC is assumed"
        seconds = network.round_trip_of_ranks(host.ranks[0], host.ranks[-1])
        round_trips = {named.name: seconds for named in cluster.hosts}
        if declared is None:
            cluster = Cluster(racks=cluster.racks, latency=half(seconds))
    return ProbeResult(
        cluster=cluster,
        measured=False,
        round_trips=round_trips,
        sureness="sure" if declared is None else "declared",
        reason="one host is one rack",
        contradictions=tuple(_host_contradictions(declared, [host]) if declared else ()),
        notes=(note,),
        measurements=network.measurements,
        seconds=monotonic() - start,
    )


def in_one_rack(infos: Sequence[HostInfo]) -> Cluster:
    named = zip(names_of(infos, None), infos, strict=True)
    hosts = tuple(Host(name=name, ranks=info.ranks) for name, info in named)
    return Cluster(racks=(Rack(name="rack0", hosts=hosts),))


def declared_racks(declared: Cluster, ranks: Sequence[int]) -> list[frozenset[int]]:
    """The hosts of each declared rack; host i has rank `ranks[i]`."""
    racks = grouped((declared.rack(rank).name, host) for host, rank in enumerate(ranks))
    return [frozenset(rack) for rack in racks.values()]


def _round_trips(
    network: ProbeCoordinator, racks: Sequence[frozenset[int]], inferred: InferredRacks
) -> dict[tuple[int, int], float]:
    """The round trips that inference measured, and of every host with another of its rack."""
    round_trips = dict(inferred.round_trips)
    for rack in racks:
        first, *others = sorted(rack)
        for other in others:
            if (first, other) not in round_trips:
                round_trips[first, other] = network.round_trip(first, other)
    return round_trips


def _host_contradictions(declared: Cluster, infos: Sequence[HostInfo]) -> list[str]:
    contradictions = []
    for info in infos:
        names = {declared.host(rank).name for rank in info.ranks}
        if len(names) > 1:
            contradictions.append(f"{' and '.join(sorted(names))} are declared, but are one host")
    host_of = {rank: info for info in infos for rank in info.ranks}
    for host in declared.hosts:
        if len({host_of[rank].ranks for rank in host.ranks}) > 1:
            contradictions.append(
                f"the ranks of {host.name} are declared on one host, but are on several"
            )
    return contradictions


def _rack_contradictions(
    declared: Cluster, inferred: InferredRacks, names: list[str], ranks: list[int]
) -> list[str]:
    """Pairs of hosts whose declared and inferred racks differ; host i has rank `ranks[i]`."""
    if inferred.inferred_by is None:
        return []
    shares = "share an uplink" if inferred.inferred_by == "rates" else "are near each other"
    rack_of = {host: number for number, rack in enumerate(inferred.racks) for host in rack}
    contradictions = []
    for one, other in combinations(range(len(names)), 2):
        rack = declared.rack(ranks[one])
        together = rack is declared.rack(ranks[other])
        if together != (rack_of[one] == rack_of[other]):
            where, don_t = (rack.name, "don't ") if together else ("different racks", "")
            contradictions.append(
                f"{names[one]} and {names[other]} are declared in {where}, but by "
                f"{inferred.inferred_by} they {don_t}{shares}"
            )
    more = len(contradictions) - MAX_LISTED_MISMATCHES
    if more > 0:
        contradictions[MAX_LISTED_MISMATCHES:] = [f"and so for {more} pairs of hosts more"]
    return contradictions


def _rate_contradictions(declared: Cluster, measured: Cluster) -> Iterator[str]:
    """Links that are far slower or faster than declared."""
    nics = {host.ranks[0]: host.nic for host in measured.hosts}
    uplinks = {rack.name: rack.uplink for rack in measured.racks}
    links: list[tuple[str, Duplex | None, Duplex | None]] = []
    if not any("NIC" in text for text in declared.assumed):
        links += [(f"{h.name}'s NIC", h.nic, nics.get(h.ranks[0])) for h in declared.hosts]
    links += [(f"{r.name}'s uplink", r.uplink, uplinks.get(r.name)) for r in declared.racks]
    for name, wanted, real in links:
        if wanted is None or real is None:
            continue
        for direction, expected, found in (
            ("out", wanted.out, real.out),
            ("in", wanted.into, real.into),
        ):
            ratio = found.bits_per_second / expected.bits_per_second
            if not PLAUSIBLE_RATE_RATIOS[0] <= ratio <= PLAUSIBLE_RATE_RATIOS[1]:
                rate = about(found.bits_per_second, "bit/s")
                yield f"{name} is declared {expected} {direction}, but {rate} was measured"

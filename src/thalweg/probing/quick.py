"""The rates of a cluster's links in a few seconds, where its racks are known.

A probe takes most of its time to find out who shares a rack. Where that is known, each host sends
to two partners of its rack and takes in from two, and each uplink is filled two or three times each
way, for a fifth of a second each (the first may have had a slow start: if two differ, the median of
three counts). Who looks slow is tried with others, as in a probe, so one slow NIC or uplink is
found and nobody else is blamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from time import monotonic

from thalweg.facts import Cluster, format_cluster, parse_cluster
from thalweg.probing.assembly import cluster_of, names_of
from thalweg.probing.conductor import Conductor, Effort, Station, conducted
from thalweg.probing.nics import measure_nics
from thalweg.probing.survey import Surveyed, declared_racks, in_one_rack, survey
from thalweg.probing.uplinks import measure_uplinks
from thalweg.runtime import Alarm, World
from thalweg.runtime.launch import ONE_RACK

QUICK = Effort(pings=40, short=0.15, long=0.2)
PARTNERS = 2  # of each host
FILLED = 3  # times at most, each way of an uplink
PINGED = 3  # hosts of each rack, by its first
Counted = Callable[[int], None]
"""Called with the number of measurements so far."""


def quick_survey(
    room: World,
    alarm: Alarm,
    declared: Cluster | None,
    *,
    counted: Counted = lambda done: None,
) -> Cluster:
    """The declared racks with the rates that their links have now; the same on all ranks, which
    call this together, each in a room of the same name (`World.room`) that nothing else uses: so
    it serves in the middle of a run too, where nothing is sent meanwhile. Without declared racks it
    is a whole probe."""
    effort = Effort() if declared is None else QUICK

    def survey_links(conductor: Conductor) -> str:
        return format_cluster(surveyed(conductor, declared))

    return parse_cluster(conducted(room, alarm, effort, survey_links, counted))


def surveyed(network: Surveyed, declared: Cluster | None) -> Cluster:
    """On rank 0. What isn't declared as it stands is found out by a whole probe; where one rack is
    only assumed, its hosts are those that are there."""
    if declared is not None and ONE_RACK in declared.assumed:
        declared = in_one_rack(network.stations)
    racks = None if declared is None else racks_of(network.stations, declared)
    if network.size == 1 or declared is None or racks is None:
        return survey(network, declared, monotonic()).cluster
    nics = measure_nics(network, racks, PARTNERS)
    uplinks = measure_uplinks(network, racks, nics, FILLED)
    names = names_of(network.stations, declared)
    trips = _round_trips(network, racks)
    return cluster_of(network.stations, names, racks, nics, uplinks, trips, declared)


def racks_of(stations: Sequence[Station], declared: Cluster) -> list[frozenset[int]] | None:
    """The hosts of each declared rack, by number; None if a host isn't as it is declared."""
    if any({*station.ranks} != {*declared.host(station.ranks[0]).ranks} for station in stations):
        return None
    return declared_racks(declared, [station.ranks[0] for station in stations])


def _round_trips(
    network: Surveyed, racks: Sequence[frozenset[int]]
) -> dict[tuple[int, int], float]:
    """Of a few hosts of each rack, and between the racks' first hosts."""
    within = [(min(rack), host) for rack in racks for host in sorted(rack)[1 : 1 + PINGED]]
    across = combinations(sorted(min(rack) for rack in racks), 2)
    return {pair: network.round_trip(*pair) for pair in (*within, *across)}

"""Inference of racks, and its confidence: by latency if that is conclusive, else by rates.

By latency, hosts are clustered by leaders. A host without a rack becomes a leader: it pings all
others without one, and their round trips are split at the widest gap between two of them (as a
ratio); the near hosts are its rack. So each rack takes one sweep over the remaining hosts: at most
N C round trips in all, for N hosts in C racks.

Noise has gaps, too. So all these pairs are measured again, and a few new ones; latency is
conclusive if in this second measurement the shortest round trip across racks takes at least
`MIN_RACK_RTT_RATIO` times as long as the longest within.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from random import Random
from typing import Literal

from thalweg.probing.coordinator import ProbeCoordinator
from thalweg.probing.racks_by_bandwidth import ContentionProbe, Rack, racks_by_rates

MIN_RACK_SEARCH_HOSTS = 4  # for two flows
CLEAR_RACK_RTT_RATIO = 1.3  # of round trips across racks to those within
MIN_RACK_RTT_RATIO = 1.15
LATENCY_CHECKS_PER_RACK = 3

RoundTrips = dict[tuple[int, int], float]
"""Seconds, by the two hosts in ascending order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Racks by latency, None if that is inconclusive. `ratio` is that of the shortest round trip
    across racks to the longest within."""

    racks: list[Rack] | None
    round_trips: RoundTrips
    ratio: float


def racks_by_latency(network: ProbeCoordinator, draw: Random) -> Latency:
    racks, first = _by_leaders(network)
    if len(racks) == 1:
        return Latency(racks=None, round_trips=first, ratio=1.0)
    pairs = [*first, *_checks(racks, draw)]
    second = {pair: network.round_trip(*pair) for pair in dict.fromkeys(pairs)}
    ratio = separation(racks, second)
    return Latency(
        racks=racks if ratio >= MIN_RACK_RTT_RATIO else None,
        round_trips={pair: min(t, first.get(pair, t)) for pair, t in second.items()},
        ratio=ratio,
    )


def _by_leaders(network: ProbeCoordinator) -> tuple[list[Rack], RoundTrips]:
    """The racks by the first measurement, and its round trips."""
    unassigned = list(range(network.size))
    racks: list[Rack] = []
    round_trips: RoundTrips = {}
    border: float | None = None  # seconds; of an earlier leader if this one's pings have no gap
    while unassigned:
        leader = unassigned.pop(0)
        times = {host: network.round_trip(leader, host) for host in unassigned}
        round_trips |= {(leader, host): seconds for host, seconds in times.items()}
        border = widest_gap(list(times.values())) or border
        near = {host for host in unassigned if border is None or times[host] < border}
        racks.append(frozenset({leader, *near}))
        unassigned = [host for host in unassigned if host not in near]
    return racks, round_trips


def widest_gap(times: Sequence[float]) -> float | None:
    """The middle of the widest gap between two times; None if it isn't wide enough."""
    gaps = [(far / near, sqrt(far * near)) for near, far in pairwise(sorted(times))]
    if not gaps or max(gaps)[0] < MIN_RACK_RTT_RATIO:
        return None
    return max(gaps)[1]


def separation(racks: Sequence[Rack], round_trips: Mapping[tuple[int, int], float]) -> float:
    """The ratio of the shortest round trip across racks to the longest within; 0 without both."""
    rack_of = {host: number for number, rack in enumerate(racks) for host in rack}
    within = [t for (one, other), t in round_trips.items() if rack_of[one] == rack_of[other]]
    across = [t for (one, other), t in round_trips.items() if rack_of[one] != rack_of[other]]
    return min(across) / max(within) if within and across else 0.0


def _checks(racks: Sequence[Rack], draw: Random) -> list[tuple[int, int]]:
    """Random pairs of hosts within racks, and across racks."""
    pairs = []
    everybody = frozenset[int]().union(*racks)
    for rack in racks:
        for _ in range(LATENCY_CHECKS_PER_RACK):
            if len(rack) > 2:
                pairs.append(draw.sample(sorted(rack), 2))
            pairs.append([draw.choice(sorted(rack)), draw.choice(sorted(everybody - rack))])
    return [(min(pair), max(pair)) for pair in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferredRacks:
    """The racks, and how they were inferred; if neither latency nor rates are conclusive, one rack
    is assumed."""

    racks: Sequence[Rack]
    inferred_by: Literal["latency", "rates"] | None
    sureness: Literal["sure", "likely", "guess"]
    reason: str
    round_trips: dict[tuple[int, int], float]


def infer_racks(network: ProbeCoordinator, draw: Random) -> InferredRacks:
    latency = racks_by_latency(network, draw)
    if latency.racks is not None:
        return InferredRacks(
            racks=latency.racks,
            inferred_by="latency",
            sureness="sure" if latency.ratio >= CLEAR_RACK_RTT_RATIO else "likely",
            reason=f"round trips across racks take at least {latency.ratio:.2f}x as long as those "
            f"within, in all of {len(latency.round_trips)} pairs",
            round_trips=latency.round_trips,
        )
    sharing = racks_by_rates(ContentionProbe(network, draw))
    if not sharing.racks:
        reason = (
            "neither latency nor rates tell hosts apart: no two flows slow each other down, so an "
            "uplink carries those of two hosts at least"
        )
        if sharing.crowded:
            reason += "; more flows at once do, so declare racks with --cluster if there are any"
        elif network.size < MIN_RACK_SEARCH_HOSTS:
            reason = f"racks can't be told apart among {network.size} hosts: rates need four"
        return InferredRacks(
            racks=[frozenset(range(network.size))],
            inferred_by=None,
            sureness="guess",
            reason=reason,
            round_trips=latency.round_trips,
        )
    scattered = len(sharing.loose) > 1
    certain = sharing.agreed == sharing.checks >= len(sharing.racks) and not scattered
    return InferredRacks(
        racks=sharing.racks,
        inferred_by="rates",
        sureness="sure" if certain else "likely",
        reason="hosts of a rack slow each other's flows to other racks down, and others don't: "
        f"{sharing.agreed} of {sharing.checks} checks agree (latency is inconclusive)"
        + (f"; {len(sharing.loose)} hosts that share with nobody count as one rack" * scattered),
        round_trips=latency.round_trips,
    )

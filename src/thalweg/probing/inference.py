"""Which hosts are in one rack, and how sure that is: by latency if it tells, else by rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from thalweg.probing.contention import Contention
from thalweg.probing.latency import Latency, racks_by_latency
from thalweg.probing.network import Network
from thalweg.probing.sharing import Sharing, racks_by_rates

Rack = frozenset[int]
Sureness = Literal["sure", "likely", "guess"]
FEWEST_HOSTS = 4  # for two flows
CLEAR_RATIO = 1.3  # of round trips across to those within racks


@dataclass(frozen=True, slots=True, kw_only=True)
class Racks:
    """`told` by latency or by rates; None: by neither, and it is assumed that there is one rack."""

    racks: Sequence[Rack]
    told: Literal["latency", "rates"] | None
    sureness: Sureness
    reason: str
    round_trips: dict[tuple[int, int], float]


def infer_racks(network: Network, draw: Random) -> Racks:
    latency = racks_by_latency(network, draw)
    if latency.racks is not None:
        return Racks(
            racks=latency.racks,
            told="latency",
            sureness="sure" if latency.ratio >= CLEAR_RATIO else "likely",
            reason=f"round trips across racks take at least {latency.ratio:.2f}x as long as those "
            f"within, in all of {len(latency.round_trips)} pairs",
            round_trips=latency.round_trips,
        )
    contention = Contention(network, draw)
    contention.look_round()
    return _by_rates(network.size, latency, racks_by_rates(contention))


def _by_rates(size: int, latency: Latency, sharing: Sharing) -> Racks:
    if not sharing.racks:
        reason = (
            "neither latency nor rates tell hosts apart: no two flows slow each other down, so an "
            "uplink carries those of two hosts at least"
        )
        if sharing.crowded:
            reason += "; more flows at once do, so declare racks with --cluster if there are any"
        elif size < FEWEST_HOSTS:
            reason = f"racks can't be told apart among {size} hosts: rates need four"
        return Racks(
            racks=[frozenset(range(size))],
            told=None,
            sureness="guess",
            reason=reason,
            round_trips=latency.round_trips,
        )
    scattered = len(sharing.loose) > 1
    whole = sharing.agreed == sharing.checks >= len(sharing.racks) and not scattered
    return Racks(
        racks=sharing.racks,
        told="rates",
        sureness="sure" if whole else "likely",
        reason="hosts of a rack slow each other's flows to other racks down, and others don't: "
        f"{sharing.agreed} of {sharing.checks} checks agree (latency doesn't tell)"
        + (f"; {len(sharing.loose)} hosts that share with nobody count as one rack" * scattered),
        round_trips=latency.round_trips,
    )

"""Where what was declared and what was measured don't go together, in words.

What is declared about racks holds all the same: measurements can't see everything, and who declared
it may know better.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from thalweg.facts import Cluster, Duplex, about
from thalweg.probing.inference import Racks

FAR_OFF = (0.8, 1.15)  # measured over declared; payload is 0.956 of a link's rate
MOST = 8  # that are told in full


def rack_contradictions(
    declared: Cluster, found: Racks, names: list[str], ranks: list[int]
) -> list[str]:
    """Hosts by their number in `found`, and as the declaration has them by a rank."""
    if found.told is None:
        return []
    shares = "share an uplink" if found.told == "rates" else "are near each other"
    rack_of = {host: number for number, rack in enumerate(found.racks) for host in rack}
    told = []
    for one, other in combinations(range(len(names)), 2):
        together = declared.rack(ranks[one]) is declared.rack(ranks[other])
        if together and rack_of[one] != rack_of[other]:
            rack = declared.rack(ranks[one]).name
            told.append(
                f"{names[one]} and {names[other]} are declared in {rack}, but by {found.told} they "
                f"don't {shares}"
            )
        elif not together and rack_of[one] == rack_of[other]:
            told.append(
                f"{names[one]} and {names[other]} are declared in different racks, but by "
                f"{found.told} they {shares}"
            )
    more = len(told) - MOST
    return told if more <= 0 else [*told[:MOST], f"and so for {more} pairs of hosts more"]


def rate_contradictions(declared: Cluster, measured: Cluster) -> list[str]:
    """Links that are far slower or faster than declared."""
    nics = {host.ranks[0]: host for host in measured.hosts}
    told: list[str] = []
    if not any("NIC" in text for text in declared.assumed):
        for host in declared.hosts:
            if host.ranks[0] in nics:
                told += _compared(f"{host.name}'s NIC", host.nic, nics[host.ranks[0]].nic)
    uplinks = {rack.name: rack.uplink for rack in measured.racks}
    for rack in declared.racks:
        found = uplinks.get(rack.name)
        if rack.uplink is not None and found is not None:
            told += _compared(f"{rack.name}'s uplink", rack.uplink, found)
    return told


def _compared(name: str, declared: Duplex, measured: Duplex) -> Iterator[str]:
    for way, said, found in (
        ("out", declared.out, measured.out),
        ("in", declared.into, measured.into),
    ):
        ratio = found.bits_per_second / said.bits_per_second
        if not FAR_OFF[0] <= ratio <= FAR_OFF[1]:
            yield (
                f"{name} is declared {said} {way}, but {about(found.bits_per_second, 'bit/s')} "
                "was measured"
            )

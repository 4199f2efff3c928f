"""How fast each host's NIC is, out and in.

Every host is in one flow at a time, first with partners of its own rack: a round robin, in which
the flows of a rack's k-th round are those of the circle method, once in each direction. A flow is
as fast as the slower of its two ends, so the best of several partners counts. Who is slower than
others is tried with the fastest hosts there are, of its own rack and of another; at most one flow
of a round crosses a rack's uplink.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from thalweg.probing.network import Network, ProbeFlow

NIC_ROUND_COUNT = 3  # of the round robin
RETRY_SAME_RACK_PARTNERS, RETRY_OTHER_RACK_PARTNERS = (
    2,
    1,
)  # the fastest partners for who looks slow, of its own rack and of others
SUSPECT_NIC_RATIO = 0.9  # of the median


@dataclass(frozen=True, slots=True)
class Nics:
    """Bits per second by host."""

    out: dict[int, float]
    into: dict[int, float]


def measure_nics(
    network: Network, racks: Sequence[frozenset[int]], rounds: int = NIC_ROUND_COUNT
) -> Nics:
    """With so many partners each."""
    hosts = sorted(host for rack in racks for host in rack)
    nics = Nics(dict.fromkeys(hosts, 0.0), dict.fromkeys(hosts, 0.0))
    rack_of = {host: number for number, rack in enumerate(racks) for host in rack}

    def measure(flows: Iterable[ProbeFlow]) -> None:
        for together in _rounds(flows, rack_of, network.at_once):
            for flow, rate in zip(together, network.rates(together), strict=True):
                nics.out[flow.source] = max(rate, nics.out[flow.source])
                nics.into[flow.target] = max(rate, nics.into[flow.target])

    pairs = [pair for rack in racks for pair in round_robin(sorted(rack), rounds)]
    measure(ProbeFlow(one, other) for one, other in pairs)
    measure(ProbeFlow(other, one) for one, other in pairs)
    measure(_second_tries(nics, rack_of))
    return nics


def round_robin(hosts: Sequence[int], rounds: int = NIC_ROUND_COUNT) -> Iterator[tuple[int, int]]:
    """The pairs of the first rounds of the circle method: one stays, the others go round."""
    seats: list[int | None] = [*hosts] if len(hosts) % 2 == 0 else [*hosts, None]
    for _ in range(min(rounds, len(seats) - 1)):
        for one, other in zip(seats[: len(seats) // 2], reversed(seats), strict=False):
            if one is not None and other is not None:
                yield one, other
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _second_tries(nics: Nics, rack_of: dict[int, int]) -> Iterator[ProbeFlow]:
    """For those that look slow, or have nobody else in their rack."""
    for rates, outward in ((nics.out, True), (nics.into, False)):
        usual = median(rates.values())
        others_rates = nics.into if outward else nics.out
        for host in rates:
            if rates[host] > SUSPECT_NIC_RATIO * usual > 0:
                continue
            partners = sorted((p for p in rates if p != host), key=lambda p: -others_rates[p])
            near = [p for p in partners if rack_of[p] == rack_of[host]][:RETRY_SAME_RACK_PARTNERS]
            far = [p for p in partners if rack_of[p] != rack_of[host]][
                : RETRY_OTHER_RACK_PARTNERS if near else NIC_ROUND_COUNT
            ]
            for partner in near + far:
                yield ProbeFlow(host, partner) if outward else ProbeFlow(partner, host)


def _rounds(
    flows: Iterable[ProbeFlow], rack_of: dict[int, int], most: int
) -> list[list[ProbeFlow]]:
    """No host twice in a round, and no rack in two flows that cross its uplink."""
    rounds: list[tuple[list[ProbeFlow], set[int], set[int]]] = []
    for flow in flows:
        crossing = {rack_of[host] for host in flow}
        crossing = crossing if len(crossing) == 2 else set()
        for together, busy, crossed in rounds:
            if len(together) < most and not busy & {*flow} and not crossed & crossing:
                together.append(flow)
                busy |= {*flow}
                crossed |= crossing
                break
        else:
            rounds.append(([flow], {*flow}, crossing))
    return [together for together, _, _ in rounds]

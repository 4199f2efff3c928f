"""The rates of NICs and of uplinks, out and in.

NICs: every host is in one flow at a time, first with partners of its own rack: a round robin, in
which the flows of a rack's k-th round are those of the circle method, once in each direction. A
flow is as fast as the slower of its two ends, so the best of several partners counts. A host that
is slower than others is measured with the fastest hosts, of its own rack and of another; at most
one flow of a round crosses a rack's uplink.

Uplinks: a single flow is no faster than a NIC. So k hosts of a rack send to k hosts of the other
racks, two at first, then twice as many, until all together are slower than their NICs: that sum is
the uplink's rate. If all hosts of the rack together aren't, it is a lower bound, and the uplink is
never the bottleneck. The other ends are spread over the other racks, so that their uplinks aren't
measured instead; with only one other rack, the two uplinks can't be distinguished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from statistics import median
from typing import Self

from thalweg.probing.coordinator import ProbeCoordinator, ProbeFlow

NIC_ROUND_COUNT = 3  # rounds of the round robin
RETRY_SAME_RACK_PARTNERS = 2  # fastest partners for a host that looks slow, of its own rack
RETRY_OTHER_RACK_PARTNERS = 1  # and of other racks
SUSPECT_NIC_RATIO = 0.9  # of the median rate, up to which a host is measured again
NIC_LIMITED_RATIO = 0.9  # of the sum of the NICs' rates, below which the uplink is the limit
UPLINK_REPEAT_COUNT = 3
UPLINK_AGREEMENT_RATIO = 1.03  # largest to smallest of several sums that agree


@dataclass(frozen=True, slots=True)
class Nics:
    """The rate of each host's NIC in bits per second: that of its fastest flow so far."""

    out: dict[int, float]
    into: dict[int, float]

    @classmethod
    def unmeasured(cls, hosts: Iterable[int]) -> Self:
        zeros = dict.fromkeys(hosts, 0.0)
        return cls(zeros, zeros.copy())

    def measure(
        self, network: ProbeCoordinator, flows: Sequence[ProbeFlow], *, short: bool = False
    ) -> list[float]:
        """Measure the rates of these flows while all of them run."""
        rates = network.rates(flows, short=short)
        for flow, rate in zip(flows, rates, strict=True):
            self.out[flow.source] = max(rate, self.out[flow.source])
            self.into[flow.target] = max(rate, self.into[flow.target])
        return rates


def measure_nics(
    network: ProbeCoordinator, racks: Sequence[frozenset[int]], rounds: int = NIC_ROUND_COUNT
) -> Nics:
    """Measure each host with `rounds` partners, and those that look slow with more."""
    rack_of = {host: number for number, rack in enumerate(racks) for host in rack}
    nics = Nics.unmeasured(sorted(rack_of))

    def measure(flows: Iterable[ProbeFlow]) -> None:
        for together in in_rounds(flows, network.at_once, rack_of):
            nics.measure(network, together)

    pairs = [pair for rack in racks for pair in round_robin(sorted(rack), rounds)]
    measure(ProbeFlow(one, other) for one, other in pairs)
    measure(ProbeFlow(other, one) for one, other in pairs)
    measure(_retries(nics, rack_of))
    return nics


def round_robin(hosts: Sequence[int], rounds: int = NIC_ROUND_COUNT) -> Iterator[tuple[int, int]]:
    """The pairs of the first rounds of the circle method: one stays, the others go round."""
    circle: list[int | None] = [*hosts] if len(hosts) % 2 == 0 else [*hosts, None]
    for _ in range(min(rounds, len(circle) - 1)):
        for one, other in zip(circle[: len(circle) // 2], reversed(circle), strict=False):
            if one is not None and other is not None:
                yield one, other
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _retries(nics: Nics, rack_of: dict[int, int]) -> Iterator[ProbeFlow]:
    """Further flows of hosts that look slow, or are alone in their rack."""
    for rates, outward in ((nics.out, True), (nics.into, False)):
        baseline = median(rates.values())
        others_rates = nics.into if outward else nics.out
        for host in rates:
            if rates[host] > SUSPECT_NIC_RATIO * baseline > 0:
                continue
            partners = sorted((p for p in rates if p != host), key=lambda p: -others_rates[p])
            near = [p for p in partners if rack_of[p] == rack_of[host]][:RETRY_SAME_RACK_PARTNERS]
            far = [p for p in partners if rack_of[p] != rack_of[host]]
            far = far[: RETRY_OTHER_RACK_PARTNERS if near else NIC_ROUND_COUNT]
            for partner in near + far:
                yield ProbeFlow(host, partner) if outward else ProbeFlow(partner, host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uplink:
    """The rates of a rack's uplink in bits per second; lower bounds, if it wasn't `full`. Its
    oversubscription is the sum of its NICs' rates over its own."""

    rack: str = ""
    out: float
    out_full: bool
    into: float
    into_full: bool
    oversubscription: float | None

    @property
    def limits(self) -> bool:
        """True if the uplink is slower than the NICs of its rack, in either direction."""
        return self.out_full or self.into_full


def measure_uplinks(
    network: ProbeCoordinator,
    racks: Sequence[frozenset[int]],
    nics: Nics,
    repeats: int = UPLINK_REPEAT_COUNT,
) -> list[Uplink | None]:
    """The uplink of each rack; None if there is only one rack.

    A full uplink is measured `repeats` times, unless the first two measurements agree."""
    if len(racks) < 2:
        return [None for _ in racks]
    measure = partial(_measure, network, racks, nics, repeats)
    numbers = range(1 if len(racks) == 2 else len(racks))
    found = [(measure(number, outward=True), measure(number, outward=False)) for number in numbers]
    if len(racks) == 2:  # out of one rack is into the other
        found.append((found[0][1], found[0][0]))
    return [_uplink(rack, nics, *rates) for rack, rates in zip(racks, found, strict=True)]


def _uplink(rack: frozenset[int], nics: Nics, *directions: tuple[float, bool]) -> Uplink:
    (out, out_full), (into, into_full) = directions
    factors = [
        sum(rates[host] for host in rack) / rate
        for rates, (rate, full) in zip((nics.out, nics.into), directions, strict=True)
        if full
    ]
    return Uplink(
        out=out,
        out_full=out_full,
        into=into,
        into_full=into_full,
        oversubscription=round(max(factors), 2) if factors else None,
    )


def _measure(
    network: ProbeCoordinator,
    racks: Sequence[frozenset[int]],
    nics: Nics,
    repeats: int,
    number: int,
    *,
    outward: bool,
) -> tuple[float, bool]:
    """The rate of one direction of a rack's uplink in bits per second, and whether it is full."""
    own_rates, other_rates = (nics.out, nics.into) if outward else (nics.into, nics.out)
    own = sorted(racks[number], key=lambda host: -own_rates[host])
    others = [rack for index, rack in enumerate(racks) if index != number]
    far = interleaved(sorted(rack, key=lambda host: -other_rates[host]) for rack in others)
    pairs = list(zip(own, far, strict=False))
    allowed = [min(own_rates[near], other_rates[other]) for near, other in pairs]
    count = min(2, len(pairs))
    while True:
        flows = [ProbeFlow(*(pair if outward else pair[::-1])) for pair in pairs[:count]]
        least = NIC_LIMITED_RATIO * sum(allowed[:count])
        totals = [sum(network.rates(flows))]
        while len(totals) < repeats and totals[0] < least:
            totals.append(sum(network.rates(flows)))
            if len(totals) == 2 and max(totals) < UPLINK_AGREEMENT_RATIO * min(totals):
                break
        if median(totals) < least:
            return median(totals), True
        if count == len(pairs):
            return max(totals), False
        count = min(2 * count, len(pairs))


def in_rounds(
    flows: Iterable[ProbeFlow], most: int, rack_of: Mapping[int, int] | None = None
) -> list[list[ProbeFlow]]:
    """Rounds of at most `most` flows, in which every host is in at most one flow.

    With `rack_of`, also every rack's uplink carries at most one flow of a round."""
    rounds: list[tuple[list[ProbeFlow], set[object]]] = []
    for flow in flows:
        racks = {("rack", rack_of[host]) for host in flow} if rack_of else set()
        used = {*flow, *(racks if len(racks) == 2 else ())}
        for together, busy in rounds:
            if len(together) < most and not busy & used:
                together.append(flow)
                busy |= used
                break
        else:
            rounds.append(([flow], used))
    return [together for together, _ in rounds]


def interleaved(groups: Iterable[Sequence[int]]) -> list[int]:
    """The hosts of several groups, one of each group in turn."""
    return [host for turn in zip_longest(*groups) for host in turn if host is not None]

"""How fast each rack's uplink is, out and in.

A single flow can't tell: it is no faster than a NIC. So k hosts of a rack send to k hosts of the
other racks, two at first, then twice as many, until all together are slower than their NICs would
be: that sum is the uplink's rate. If all hosts of the rack together aren't, it is at least so fast
and never the bottleneck. The other ends are spread over the other racks, so that it isn't their
uplinks that are measured; if there is only one other rack, one can't be told from the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

from thalweg.probing.network import Network, ProbeFlow
from thalweg.probing.nics import Nics

NIC_LIMITED_RATIO = 0.9  # of what the NICs would allow
UPLINK_REPEAT_COUNT = 3
UPLINK_AGREEMENT_RATIO = 1.03  # times


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkDirection:
    """One direction of an uplink: bits per second; not `full`: that is the least that it carries"""

    rate: float
    full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Uplink:
    out: UplinkDirection
    into: UplinkDirection

    @property
    def limits(self) -> bool:
        return self.out.full or self.into.full


def measure_uplinks(
    network: Network,
    racks: Sequence[frozenset[int]],
    nics: Nics,
    repeats: int = UPLINK_REPEAT_COUNT,
) -> list[Uplink | None]:
    """None where there is no other rack. What is full is measured so often, unless two agree."""
    if len(racks) < 2:
        return [None for _ in racks]
    found = [
        Uplink(
            out=_measure(network, racks, number, nics, repeats, outward=True),
            into=_measure(network, racks, number, nics, repeats, outward=False),
        )
        for number in range(1 if len(racks) == 2 else len(racks))
    ]
    if len(racks) == 2:  # the way out of one is the way into the other
        found.append(Uplink(out=found[0].into, into=found[0].out))
    return [*found]


def _measure(
    network: Network,
    racks: Sequence[frozenset[int]],
    number: int,
    nics: Nics,
    repeats: int,
    *,
    outward: bool,
) -> UplinkDirection:
    own_rates, other_rates = (nics.out, nics.into) if outward else (nics.into, nics.out)
    own = sorted(racks[number], key=lambda host: -own_rates[host])
    others = [rack for index, rack in enumerate(racks) if index != number]
    far = _spread([sorted(rack, key=lambda host: -other_rates[host]) for rack in others])
    pairs = list(zip(own, far, strict=False))
    allowed = [min(own_rates[near], other_rates[other]) for near, other in pairs]
    number_of_flows = min(2, len(pairs))
    while True:
        flows = [ProbeFlow(*(pair if outward else pair[::-1])) for pair in pairs[:number_of_flows]]
        least = NIC_LIMITED_RATIO * sum(allowed[:number_of_flows])
        totals = [sum(network.rates(flows))]
        while len(totals) < repeats and totals[0] < least and not _agree(totals):
            totals.append(sum(network.rates(flows)))
        if median(totals) < least:
            return UplinkDirection(rate=median(totals), full=True)
        if number_of_flows == len(pairs):
            return UplinkDirection(rate=max(totals), full=False)
        number_of_flows = min(2 * number_of_flows, len(pairs))


def _agree(totals: Sequence[float]) -> bool:
    """Whether another one would tell nothing new."""
    return len(totals) > 1 and max(totals) < UPLINK_AGREEMENT_RATIO * min(totals)


def _spread(racks: Sequence[Sequence[int]]) -> list[int]:
    """One host of each rack in turn."""
    turns = zip_longest(*racks)
    return [host for turn in turns for host in turn if host is not None]

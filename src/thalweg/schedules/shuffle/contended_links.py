"""The racks and hosts that are too slow to average at every step, and how often they do.

With S bytes of parameters and b bytes per second, a pair takes S/b, a ring of m members 2(m-1)/m of
it. The usual step is the exchange of a rack without its delegate, and the computation. A link is
given as many steps for its pair as it needs:

    a host    whose NIC has less than 0.6 of the usual rate
    a rack    whose uplink has less than 0.6 of the usual rate of racks, if the exchange between all
              racks would take more than 1.67 of the usual step; all racks, if even pairs of them do

Delegates average all together if that leaves their uplinks some idle time in a usual step, else in
pairs. These mix more slowly, but through an uplink that is always busy one step's exchange delays
the next one's.

A number of steps is a power of two, so that the windows of slow and slower links nest, and at most
8: drift grows with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf, log2
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thalweg.schedules.group import Group

CONTENDED_RATE_RATIO = 0.6  # of the usual rate
MAX_WINDOW_STEPS = 8
# The part of a usual step for which an exchange of all racks may keep an uplink busy.
PAIRING_STEP_RATIO = 1.0
# That part during training, by whether it began in pairs, and whether it averages in pairs now.
ADOPTED_PAIRING_STEP_RATIOS = {
    True: {True: 0.85, False: 1.0},  # uplinks are seen through NICs: what is declared is trusted
    False: {True: 1.2, False: 1.4},
}
PAIR_WINDOW_SLACK_FACTOR = 1.1  # a pair may take so much longer than the steps that it is given

Paces = tuple[tuple[str, int], ...]
"""The steps from one averaging to the next, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContendedLinks:
    """The racks and hosts that average less often; with `pairs`, delegates of racks do so in pairs,
    not all at once."""

    racks: Paces = ()
    hosts: Paces = ()
    pairs: bool = False

    def __bool__(self) -> bool:
        return bool(self.racks or self.hosts)

    def at_most(self, steps: int) -> ContendedLinks:
        """These links with windows of at most `steps`."""
        if steps == 1:
            return ContendedLinks(pairs=self.pairs)
        racks, hosts = (
            tuple((name, min(pace, steps)) for name, pace in paces)
            for paces in (self.racks, self.hosts)
        )
        return ContendedLinks(racks=racks, hosts=hosts, pairs=self.pairs)

    def __str__(self) -> str:
        parts = [f"{name} every {steps} steps" for name, steps in (*self.racks, *self.hosts)]
        return ", ".join(parts + ["racks in pairs"] * self.pairs) or "nothing is slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rate that one exchange gets of each link, in bytes per second."""

    nics: Mapping[str, float]  # by host
    uplinks: Mapping[str, float]  # by rack; absent: never the bottleneck


def declared(group: Group) -> Rates:
    """The rates that the cluster declares. The ranks of a host share its NIC."""
    cluster = group.cluster
    nics, uplinks = {}, {}
    for rack in cluster.racks:
        if rack.uplink is not None:
            uplinks[rack.name] = min(rack.uplink.out, rack.uplink.into).bits_per_second / 8
        for host in rack.hosts:
            here = sum(rank in group.ranks for rank in host.ranks)
            if here:
                rate = min(host.nic.out, host.nic.into).bits_per_second / 8
                nics[host.name] = rate / here
    return Rates(nics=nics, uplinks=uplinks)


def contended_links(
    group: Group, rates: Rates, busy: float = 0.0, adopted: ContendedLinks | None = None
) -> ContendedLinks:
    """The contended links of a group. `busy` is the compute time for each exchanged byte. Pairing
    of delegates isn't changed from the adopted one for a small gain."""
    usual_nic = median(rates.nics.values())
    baseline = _inside(group) / usual_nic + busy
    slow = {n: rate for n, rate in rates.nics.items() if rate < CONTENDED_RATE_RATIO * usual_nic}
    names = _names(group)
    crossing = {name: min(rates.uplinks.get(name, inf), usual_nic) for name in names}
    racks = _apart(crossing, baseline) if len(names) > 1 else ()
    pairs = in_pairs(group, rates, racks, busy, adopted)
    return ContendedLinks(racks=racks, hosts=_paces(slow, baseline), pairs=pairs)


def in_pairs(
    group: Group, rates: Rates, apart: Paces, busy: float, adopted: ContendedLinks | None
) -> bool:
    """True if the racks that aren't contended average in pairs."""
    near = [name for name in _names(group) if name not in dict(apart)]
    if len(near) < 3:
        return False
    baseline = _inside(group) / median(rates.nics.values()) + busy
    ratio = PAIRING_STEP_RATIO
    if adopted is not None:
        ratio = ADOPTED_PAIRING_STEP_RATIOS[group.contended.pairs][adopted.pairs]
    return _ring(len(near)) / min(rates.uplinks.get(name, inf) for name in near) > ratio * baseline


def _names(group: Group) -> list[str]:
    return [group.cluster.rack(rack[0]).name for rack in group.racks]


def _apart(crossing: Mapping[str, float], baseline: float) -> Paces:
    """The racks that are too slow, by the rates of one exchange through their uplinks."""
    fits = baseline / CONTENDED_RATE_RATIO
    middle, whole = median(crossing.values()), _ring(len(crossing))
    slow = {
        name: rate
        for name, rate in crossing.items()
        if rate < CONTENDED_RATE_RATIO * middle and whole / rate > fits
    }
    others_are_slow = any(1 / crossing[name] > fits for name in crossing.keys() - slow)
    return _paces(crossing if others_are_slow else slow, baseline)


def _ring(members: int) -> float:
    """The time of a ring all-reduce per byte at a rate of one."""
    return 2 * (members - 1) / members


def _inside(group: Group) -> float:
    """The time of the usual rack's all-reduce without its delegate, per byte at a rate of one; at
    least that of a pair."""
    staying = [len(rack) - (len(group.racks) > 1) for rack in group.racks]
    return max(1.0, median(_ring(max(2, members)) for members in staying))


def _paces(rates: Mapping[str, float], baseline: float) -> Paces:
    """The steps that a pair needs at each of these rates, as a power of two."""
    given = PAIR_WINDOW_SLACK_FACTOR * baseline
    needed = {name: 1 / rate / given for name, rate in rates.items()}
    return tuple(
        (name, int(min(MAX_WINDOW_STEPS, max(2, 2 ** ceil(log2(max(steps, 1.0)))))))
        for name, steps in sorted(needed.items())
    )

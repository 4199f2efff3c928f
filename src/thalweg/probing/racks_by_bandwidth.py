"""Inference of racks from rates: which hosts share an uplink?

Two flows without a common host contend only where they share an uplink:

    a -> x and b -> y contend  iff  a, b are in one rack, and x, y are outside it,
                               or   x, y are in one rack, and a, b are outside it.

A *load* of one or more flows is measured alone and beside another flow. If the load loses as much
as the other flow gets, they share a link that is full:

    score = (rate of the load alone - its rate beside the other flow) / rate of the other flow

is 1 then, and 0 if they share nothing. Between two equal flows it is 2 n / U - 1 for an uplink of
U and NICs of n, so they are found to share one of up to 1.5 n. A doubtful score is measured again,
and the median decides.

A pair of flows that contend, a -> x and b -> y, shows that a, b are in one rack A, or x, y in one
rack X, or both. Every other host h is then tested in two places:

                                    a, b together   x, y together   both
    a -> x and h -> y contend iff   h in A          h not in X      h not in X
    a -> x and b -> h contend iff   h not in A      h in X          h not in A

so one sweep over h finds A or X, and a second shows whether it is both. The first two columns are
the same seen from the other end: if it is A, then x and y are in different racks, and x -> y
contends with h -> a iff h is in the rack of x; this doesn't hold if it is X. From then on hosts of
different racks are known, and a new leader z finds its rack at once: z -> x and h -> a contend iff
h is in the rack of z. Every rack takes one sweep over the remaining hosts: N * C pairs of flows at
most, and a few to begin and to check.

Slow hosts come last: one flow of theirs may fit into an uplink beside another, so they are tested
against two flows that fill it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from statistics import median

from thalweg.probing.coordinator import ProbeCoordinator, ProbeFlow
from thalweg.probing.link_rates import Nics, in_rounds, interleaved

MIN_SHARED_SCORE = 0.3
DOUBTFUL_SCORE_RANGE = (0.15, 0.4)
CONTENTION_REPEAT_COUNT = 3
SLOW_FLOW_RATIO = 0.7  # of the median rate of a flow; a slower host can't fill a link
CONTENTION_PARTNER_COUNT, CONTENTION_RETRY_PARTNER_COUNT = 2, 4
HOSTS_PER_FLOW_COUNT = 8
SUSPECT_FLOW_RATIO = 0.9  # of the rate that a flow's hosts allow
MIN_TRIED_PAIRS = 90  # of flows, before the search concludes that none contend
TRIED_PAIRS_PER_HOST = 2
MIN_HOSTS_TO_FILL_LINK = 4  # for two flows
BANDWIDTH_CHECKS_PER_RACK = 2
MAX_RACK_SEARCH_ATTEMPTS = 3

Load = tuple[ProbeFlow, ...]
Rack = frozenset[int]


class ContentionProbe:
    """Tests of contention, the best rates of every host, and those of loads so far."""

    def __init__(self, network: ProbeCoordinator, draw: Random) -> None:
        self.network = network
        self.draw = draw
        self.hosts = range(network.size)
        self.nics = Nics.unmeasured(self.hosts)
        self.fast = self._measure_hosts()
        self.alone: dict[Load, float] = {}  # the rates of loads alone

    def _measure_hosts(self) -> list[int]:
        """Measure roughly what each host sends and receives: the best of several partners counts.
        Return those that can fill a link, the fastest first.

        Few flows run at once, so that few contend; hosts that look slow are measured alone."""
        at_once = max(2, min(self.network.at_once, len(self.hosts) // HOSTS_PER_FLOW_COUNT))
        rates: list[float] = []
        for _ in range(CONTENTION_PARTNER_COUNT):
            order = self.draw.sample(self.hosts, len(self.hosts))
            ring = [ProbeFlow(a, b) for a, b in zip(order, [*order[1:], order[0]], strict=True)]
            for flows in in_rounds(ring, at_once):
                rates += self.rates(flows)
        baseline = median(rates)
        for host in self.hosts:
            others = [other for other in self.hosts if other != host]
            for other in self.draw.sample(others, min(CONTENTION_RETRY_PARTNER_COUNT, len(others))):
                for flow in (ProbeFlow(host, other), ProbeFlow(other, host)):
                    if self.speed(host) < SLOW_FLOW_RATIO * baseline:
                        self.rates((flow,))
        fastest = sorted(self.hosts, key=lambda host: -self.speed(host))
        return [host for host in fastest if self.speed(host) >= SLOW_FLOW_RATIO * baseline]

    def rates(self, flows: Sequence[ProbeFlow]) -> list[float]:
        return self.nics.measure(self.network, flows, short=True)

    def speed(self, host: int) -> float:
        return min(self.nics.out[host], self.nics.into[host])

    def flow_speed(self, flow: ProbeFlow) -> float:
        """The rate that the flow's two hosts allow, by the measurements so far."""
        return min(self.nics.out[flow.source], self.nics.into[flow.target])

    def suspects(self, flows: Sequence[ProbeFlow]) -> list[ProbeFlow]:
        """The flows that are slower than their hosts allow, while all run at once."""
        found = self.rates(flows)
        return [
            flow
            for flow, rate in zip(flows, found, strict=True)
            if rate < SUSPECT_FLOW_RATIO * self.flow_speed(flow)
        ]

    def share(self, load: Load, other: ProbeFlow) -> bool:
        scores: list[float] = []
        while not scores or (
            len(scores) < CONTENTION_REPEAT_COUNT
            and DOUBTFUL_SCORE_RANGE[0] <= median(scores) <= DOUBTFUL_SCORE_RANGE[1]
        ):
            if load not in self.alone:
                self.alone[load] = sum(self.rates(load))
            elif scores:  # the rate of the load alone is in doubt as well
                self.alone[load] = median((self.alone[load], sum(self.rates(load))))
            *beside, others = self.rates((*load, other))
            scores.append((self.alone[load] - sum(beside)) / max(others, 1.0))
        return median(scores) >= MIN_SHARED_SCORE


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkSharing:
    """Hosts that share an uplink. Of `checks` afterwards, `agreed` confirm the racks. `crowded`:
    many flows slowed each other down, but no two of them did. `loose` hosts share with no other
    host, and count as one rack."""

    racks: list[Rack]
    checks: int = 0
    agreed: int = 0
    crowded: bool = False
    loose: Rack = frozenset()


def racks_by_rates(contention: ContentionProbe) -> UplinkSharing:
    """The racks by rates; none, if no two flows contend.

    If checks disagree with the racks, a measurement was disturbed, and the search is repeated: the
    best attempt counts."""
    attempts: list[UplinkSharing] = []
    while len(attempts) < MAX_RACK_SEARCH_ATTEMPTS:
        attempts.append(_attempt(contention))
        if attempts[-1].agreed == attempts[-1].checks:
            return attempts[-1]
    return max(attempts, key=lambda attempt: attempt.agreed / attempt.checks)


def _attempt(contention: ContentionProbe) -> UplinkSharing:
    contention.alone.clear()
    everybody = [*contention.hosts]
    found, crowded = _first_pair(contention, contention.fast)
    if found is None and len(contention.fast) < len(everybody):
        found, crowded = _first_pair(contention, everybody)
    if found is None:
        return UplinkSharing(racks=[], crowded=crowded)
    strangers = {*found[0], *found[1]}.difference(contention.fast)
    racks = _RackSearch(contention, everybody if strangers else contention.fast)
    racks.begin(*found)
    racks.lead()
    racks.add_the_rest()
    return racks.checked()


def _first_pair(
    contention: ContentionProbe, hosts: Sequence[int]
) -> tuple[tuple[ProbeFlow, ProbeFlow] | None, bool]:
    """Two flows that contend, and whether flows were slowed without such a pair; many flows run at
    once."""
    tried, crowded = 0, False
    while (
        tried < max(MIN_TRIED_PAIRS, TRIED_PAIRS_PER_HOST * len(hosts))
        and len(hosts) >= MIN_HOSTS_TO_FILL_LINK
    ):
        order = contention.draw.sample(hosts, len(hosts))
        matching = [ProbeFlow(a, b) for a, b in zip(order[::2], order[1::2], strict=False)]
        for flows in in_rounds(matching, max(2, contention.network.at_once)):
            tried += len(flows) * (len(flows) - 1) // 2
            suspects = contention.suspects(flows) if len(flows) > 1 else []
            crowded |= len(suspects) > 1
            for one, other in combinations(sorted(flows, key=contention.flow_speed), 2):
                if {one, other} & {*suspects} and contention.share((other,), one):
                    return (other, one), False
    return None, crowded


class _RackSearch:
    """The racks found so far. `mirrored`: all flows run in the opposite direction, because the
    first contention found was inbound."""

    def __init__(self, contention: ContentionProbe, hosts: Sequence[int]) -> None:
        self.contention = contention
        self.hosts = hosts  # that may become leaders
        self.slow = {*contention.hosts} - {*hosts}
        self.racks: list[set[int]] = []
        self.mirrored = False
        self.loose: Rack = frozenset()

    def share(self, load: Iterable[tuple[int, int]], source: int, target: int) -> bool:
        step = -1 if self.mirrored else 1
        flows = tuple(ProbeFlow(*pair[::step]) for pair in load)
        return self.contention.share(flows, ProbeFlow(*(source, target)[::step]))

    def left(self) -> list[int]:
        """The hosts without a rack that may become leaders."""
        taken = set().union(*self.racks)
        return [host for host in self.hosts if host not in taken]

    def begin(self, one: ProbeFlow, other: ProbeFlow) -> None:
        (a, x), (b, y) = one, other
        others = [host for host in self.left() if host not in {a, b, x, y}]
        with_ab = {h for h in others if self.share([(a, x)], h, y)}
        with_xy = {*others} - with_ab
        third = {h for h in with_ab if self.share([(a, x)], b, h)}
        if third:  # a, b together and x, y together, and these are elsewhere
            self.racks = [{a, b, *with_ab - third}, {x, y, *with_xy}]
            return
        # From either end: a whole rack with a member, the ends of the flows outside, and the rest.
        sides = (
            (False, {a, b, *with_ab}, a, (x, y), sorted(with_xy)),
            (True, {x, y, *with_xy}, x, (a, b), sorted(with_ab)),
        )
        for order in (1, -1):
            for h in interleaved(rest for *_, rest in sides):
                for mirrored, rack, member, pair, rest in sides:
                    self.mirrored, (near, far) = mirrored, pair[::order]
                    if h in rest and self.share([(near, far)], h, member):
                        self._begin_with(rack, near, far, known=h)
                        return
        # Or one of the pairs are hosts without a rack of their own.
        for mirrored, rack, member, (near, _), rest in sides:
            self.mirrored = mirrored
            own = {h for h in rest[1:] if self.share([(rest[0], near)], h, member)}
            if own:
                self.racks = [rack, {rest[0], *own}]
                return
        self.mirrored = False
        self.racks = [rack for _, rack, *_ in sides]

    def _begin_with(self, rack: set[int], x: int, y: int, known: int) -> None:
        """Start with one whole rack, and the rack of x, which contains `known`, but not y."""
        self.racks = [rack]
        a = self._member(rack)
        for near, far in ((x, y), (y, x)):
            rest = [h for h in self.left() if h not in {x, y}]
            own = {h for h in rest if h == known or self.share([(near, far)], h, a)}
            self.racks.append({near, *own})

    def lead(self) -> None:
        """Find the racks of the remaining hosts, leader by leader; hosts that share with none are
        tested in the opposite direction too."""
        for _ in range(2):
            alone: set[int] = set()
            while left := [host for host in self.left() if host not in alone]:
                leader, *others = left
                x, a = (self._member(rack) for rack in self.racks[:2])
                own = {h for h in others if self.share([(leader, x)], h, a)}
                if own:
                    self.racks.append({leader, *own})
                else:
                    alone.add(leader)
            if len(alone) < 2:
                return
            self.mirrored = not self.mirrored

    def add_the_rest(self) -> None:
        """Test slow and single hosts against flows that fill a rack's uplink.

        Hosts that still share with none form one rack: no flows of theirs slow each other down."""
        whole = [rack for rack in self.racks if len(rack) > 1]
        singles = [{host} for host in self.left()] + [r for r in self.racks if len(r) == 1]
        self.racks = whole + singles
        for host in sorted(self.slow):
            for rack in self.racks:
                full = self._filling(rack)
                if full is not None and self.share(full[0], host, full[1]):
                    rack.add(host)
                    break
        self.racks = [rack for rack in self.racks if len(rack) > 1]
        rest = {*self.contention.hosts}.difference(*self.racks)
        if rest:
            self.racks.append(rest)
            self.loose = frozenset(rest)

    def _filling(self, rack: set[int]) -> tuple[list[tuple[int, int]], int] | None:
        """Up to two flows out of this rack into another, and a target at which one more flow
        doesn't contend with them inbound."""
        others = sorted((other for other in self.racks if other is not rack), key=len)
        if not others:
            return None
        far = sorted(others.pop(), key=self._rank)
        near = sorted(rack, key=self._rank)[:2]
        if others:
            return list(zip(near, far, strict=False)), self._member(others.pop())
        return (list(zip(near, far[:-1], strict=False)), far[-1]) if len(far) > 1 else None

    def checked(self) -> UplinkSharing:
        """The racks, with checks by random pairs within racks and across."""
        tried = [
            self.share([(a, x)], b, y) == together
            for rack in self.racks
            for together, (a, x, b, y) in self._checks(rack)
        ]
        racks = sorted((frozenset(rack) for rack in self.racks), key=min)
        return UplinkSharing(racks=racks, checks=len(tried), agreed=sum(tried), loose=self.loose)

    def _checks(self, rack: set[int]) -> Iterator[tuple[bool, tuple[int, int, int, int]]]:
        """Two flows of hosts of this rack, which must contend, and of one host of it and one of
        another rack, which mustn't."""
        draw = self.contention.draw
        fast = {*self.hosts}
        own = sorted(rack & fast)
        others = [sorted(other & fast) for other in self.racks if other is not rack]
        outside = [host for other in others for host in other]
        if len(own) < 2:
            return
        for _ in range(BANDWIDTH_CHECKS_PER_RACK if len(outside) > 1 else 0):
            a, b = sorted(draw.sample(own, 2), key=self._rank)
            x, y = sorted(draw.sample(outside, 2), key=self._rank)
            yield True, (a, x, b, y)
        other = draw.choice(others)
        if len(other) > 1:
            a, y = draw.sample(own, 2)
            b, x = draw.sample(other, 2)
            yield False, (a, x, b, y)

    def _rank(self, host: int) -> float:
        return -self.contention.speed(host)

    def _member(self, rack: set[int]) -> int:
        """The fastest host of the rack."""
        return min(sorted(rack), key=self._rank)

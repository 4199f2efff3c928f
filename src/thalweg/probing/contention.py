"""Contention: do flows slow each other down?

Two flows without a common host contend only where they share an uplink:

    a -> x and b -> y contend  iff  a, b are in one rack, and x, y are outside it,
                               or   x, y are in one rack, and a, b are outside it.

A *load* of one or more flows is measured alone and beside another flow. If the load loses as much
as the other flow gets, they share a link that is full:

    score = (rate of the load alone - its rate beside the other flow) / rate of the other flow

is 1 then, and 0 if they share nothing. Between two equal flows it is 2 n / U - 1 for an uplink of
U and NICs of n, so they are found to share one of up to 1.5 n. A doubtful score is measured again,
and the median decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import median

from thalweg.probing.network import Network, ProbeFlow, in_rounds

MIN_SHARED_SCORE = 0.3
DOUBTFUL_SCORE_RANGE = (0.15, 0.4)
CONTENTION_REPEAT_COUNT = 3
SLOW_FLOW_RATIO = 0.7  # of the median rate of a flow; a slower host can't fill a link
CONTENTION_PARTNER_COUNT, CONTENTION_RETRY_PARTNER_COUNT = 2, 4
HOSTS_PER_FLOW_COUNT = 8
SUSPECT_FLOW_RATIO = 0.9  # of the rate that a flow's hosts allow

Load = tuple[ProbeFlow, ...]


class ContentionProbe:
    """Tests of contention, and the best rates of every host and load so far."""

    def __init__(self, network: Network, draw: Random) -> None:
        self.network = network
        self.draw = draw
        self.out: dict[int, float] = dict.fromkeys(range(network.size), 0.0)
        self.into: dict[int, float] = dict.fromkeys(range(network.size), 0.0)
        self.fast: list[int] = []  # hosts that can fill a link, the fastest first
        self.tests = 0
        self.margins: list[float] = []  # distance of each score from the limit
        self._alone: dict[Load, float] = {}

    def measure_hosts(self) -> None:
        """Measure roughly what each host sends and receives: the best of several partners counts.

        Few flows run at once, so that few contend; hosts that look slow are measured alone."""
        at_once = max(2, min(self.network.at_once, self.network.size // HOSTS_PER_FLOW_COUNT))
        seen: list[float] = []
        for _ in range(CONTENTION_PARTNER_COUNT):
            order = self.draw.sample(range(self.network.size), self.network.size)
            ring = [ProbeFlow(a, b) for a, b in zip(order, [*order[1:], order[0]], strict=True)]
            for flows in in_rounds(ring, at_once):
                seen += self.rates(flows)
        usual = median(seen)
        for host in self.out:
            others = [other for other in self.out if other != host]
            for other in self.draw.sample(others, min(CONTENTION_RETRY_PARTNER_COUNT, len(others))):
                for flow in (ProbeFlow(host, other), ProbeFlow(other, host)):
                    if self.speed(host) < SLOW_FLOW_RATIO * usual:
                        self.rates((flow,))
        fastest = sorted(self.out, key=lambda host: -self.speed(host))
        self.fast = [host for host in fastest if self.speed(host) >= SLOW_FLOW_RATIO * usual]

    def forget(self) -> None:
        """Forget the rates of loads alone."""
        self._alone.clear()

    def rates(self, flows: Sequence[ProbeFlow]) -> list[float]:
        found = self.network.rates(flows, short=True)
        self.tests += 1
        for flow, rate in zip(flows, found, strict=True):
            self.out[flow.source] = max(rate, self.out[flow.source])
            self.into[flow.target] = max(rate, self.into[flow.target])
        return found

    def speed(self, host: int) -> float:
        return min(self.out[host], self.into[host])

    def flow_speed(self, flow: ProbeFlow) -> float:
        """The rate that the flow's two hosts allow, by the measurements so far."""
        return min(self.out[flow.source], self.into[flow.target])

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
            if scores:  # the rate of the load alone is in doubt as well
                self._alone[load] = median((self._alone[load], sum(self.rates(load))))
            scores.append(self._score(load, other))
        self.margins.append(abs(median(scores) - MIN_SHARED_SCORE))
        return median(scores) >= MIN_SHARED_SCORE

    def _score(self, load: Load, other: ProbeFlow) -> float:
        if load not in self._alone:
            self._alone[load] = sum(self.rates(load))
        *beside, others = self.rates((*load, other))
        return (self._alone[load] - sum(beside)) / max(others, 1.0)

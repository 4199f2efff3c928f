"""Max-min fair bandwidth sharing: no flow can get more without taking it from a flow with no more.

All rates grow equally until a resource is full; its flows keep that rate, and the others go on
growing (Bertsekas and Gallager, Data Networks, 6.5.2). The rates of two flows depend on each other
only if they share a resource, directly or through other flows.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace
from math import inf

from thalweg.facts.machine import TransportCosts


class SharedResource:
    """One direction of a link, or the sending or receiving side of a rank, that flows share. It is
    a token bucket of `burst` bytes."""

    __slots__ = (
        "_capacities",
        "_costs",
        "burst",
        "dry_at",
        "flows",
        "open",
        "rate",
        "room",
        "since",
        "spare",
        "tokens",
    )

    def __init__(
        self, rate: float, costs: TransportCosts | None = None, burst: float = 0.0
    ) -> None:
        """A resource with a rate in bytes per second; without `costs`, several flows use all of
        it."""
        self.rate = rate
        self.flows: dict[FluidFlow, None] = {}
        self.room = 0.0  # while rates are computed: the unused rate, negative with tokens
        self.open = 0  # and the number of flows that may still grow
        self.burst = self.tokens = burst
        self.spare = 0.0  # unused bytes per second, negative if tokens are used
        self.since = 0.0  # the time at which it had these tokens
        self.dry_at = inf
        self._costs = costs
        self._capacities: dict[int, float] = {}

    def capacity(self, flows: int) -> float:
        """The joint rate of this number of flows."""
        known = self._capacities.get(flows)
        if known is None:
            share = 1.0 if self._costs is None else self._costs.bandwidth_share(max(flows, 1))
            known = self._capacities[flows] = self.rate * share
        return known


class FluidFlow:
    """The message in flight from one rank to another: its bytes `left` at `since`, and its rate."""

    __slots__ = ("alone", "channels", "due", "left", "rate", "since")

    def __init__(self, channels: tuple[SharedResource, ...]) -> None:
        self.channels = channels
        self.alone = min((channel.capacity(1) for channel in channels), default=inf)
        self.left = 0.0
        self.since = 0.0
        self.rate = 0.0
        self.due = inf  # the time at which no bytes are left at this rate


def neighbours(channels: Iterable[SharedResource]) -> tuple[list[FluidFlow], list[SharedResource]]:
    """All flows and resources whose rates depend on these resources."""
    reached = dict.fromkeys(channels)
    to_visit = list(reached)
    flows: dict[FluidFlow, None] = {}
    while to_visit:
        for flow in to_visit.pop().flows:
            if flow not in flows:
                flows[flow] = None
                for channel in flow.channels:
                    if channel not in reached:
                        reached[channel] = None
                        to_visit.append(channel)
    return list(flows), list(reached)


def fair_rates(flows: list[FluidFlow], channels: list[SharedResource]) -> dict[FluidFlow, float]:
    """The rates of flows that use only these resources. A resource with tokens doesn't limit; flows
    without a limiting resource have no rate."""
    rates: dict[FluidFlow, float] = {}
    limiting = [channel for channel in channels if channel.flows and not channel.tokens]
    for channel in channels:
        channel.open = len(channel.flows)
        channel.room = channel.capacity(channel.open)
    levels = [(channel.room / channel.open, i) for i, channel in enumerate(limiting)]
    heapify(levels)
    while levels and len(rates) < len(flows):
        level, i = levels[0]
        channel = limiting[i]
        if not channel.open:
            heappop(levels)
            continue
        now = channel.room / channel.open  # flows limited elsewhere leave more
        if now > level:
            heapreplace(levels, (now, i))
            continue
        heappop(levels)
        for flow in channel.flows:
            if flow not in rates:
                rates[flow] = level
                for crossed in flow.channels:
                    crossed.room -= level
                    crossed.open -= 1
    return rates

"""Max-min fair sharing: nobody can get more without taking it from one who has no more.

All flows grow alike until a channel is full; those that cross it stay at that, the others go on
(Bertsekas and Gallager, Data Networks, 6.5.2). Only flows that share a channel, directly or by way
of others, matter to one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace
from math import inf

from thalweg.facts.machine import TransportCosts


class SharedResource:
    """What flows share: one direction of a link, or a rank's hand. `burst` are the bytes that it
    carries at once after a rest (`buckets`)."""

    __slots__ = (
        "_capacities",
        "_road",
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
        """`rate` in bytes per second; without a road, a crowd loses none of it."""
        self.rate = rate
        self.flows: dict[FluidFlow, None] = {}
        self.room = 0.0  # while rates are found: what is left, less than nothing with tokens
        self.open = 0  # and how many flows may still grow
        self.burst = self.tokens = burst
        self.spare = 0.0  # bytes per second that its flows leave of it, or take of the tokens
        self.since = 0.0  # when it had these tokens
        self.dry_at = inf
        self._road = costs
        self._capacities: dict[int, float] = {}

    def capacity(self, flows: int) -> float:
        """For so many flows together."""
        found = self._capacities.get(flows)
        if found is None:
            share = 1.0 if self._road is None else self._road.bandwidth_share(max(flows, 1))
            found = self._capacities[flows] = self.rate * share
        return found


class FluidFlow:
    """What goes from one rank to another: `left` bytes at `since`, at a rate."""

    __slots__ = ("alone", "channels", "due", "left", "rate", "since")

    def __init__(self, channels: tuple[SharedResource, ...]) -> None:
        self.channels = channels
        self.alone = min((channel.capacity(1) for channel in channels), default=inf)
        self.left = 0.0
        self.since = 0.0
        self.rate = 0.0
        self.due = inf  # when nothing is left at this rate


def neighbours(channels: Iterable[SharedResource]) -> tuple[list[FluidFlow], list[SharedResource]]:
    """All flows and channels whose rates depend on these channels."""
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
    """Of flows that cross no other channels than these. A channel with tokens doesn't limit; who
    crosses no other kind has no rate."""
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
        now = channel.room / channel.open  # those that others hold back leave more
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

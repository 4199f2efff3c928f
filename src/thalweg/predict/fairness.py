"""Max-min fair sharing: nobody can get more without taking it from one who has no more.

All flows grow alike until a channel is full; those that cross it stay at that, the others go on
(Bertsekas and Gallager, Data Networks, 6.5.2). Only flows that share a channel, directly or by way
of others, matter to one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import Any

from thalweg.facts.machine import Road


class Channel:
    """What flows share: one direction of a link, or a rank's hand."""

    __slots__ = ("_capacities", "_road", "flows", "open", "rate", "room")

    def __init__(self, rate: float, road: Road | None) -> None:
        """`rate` in bytes per second; without a road, a crowd loses none of it."""
        self.rate = rate
        self.flows: dict[Flow, None] = {}
        self.room = 0.0  # while rates are found: what is left
        self.open = 0  # and how many flows may still grow
        self._road = road
        self._capacities: dict[int, float] = {}

    def capacity(self, flows: int) -> float:
        """For so many flows together."""
        if flows not in self._capacities:
            share = 1.0 if self._road is None else self._road.share(flows)
            self._capacities[flows] = self.rate * share
        return self._capacities[flows]


class Flow:
    """The messages from one rank to another, one after the other."""

    __slots__ = (
        "alone",
        "channels",
        "due",
        "left",
        "message",
        "queue",
        "rate",
        "seconds",
        "since",
        "target",
    )

    def __init__(self, target: int, channels: tuple[Channel, ...], seconds: float) -> None:
        self.target = target
        self.channels = channels
        self.seconds = seconds  # of a byte's way
        self.alone = min((channel.capacity(1) for channel in channels), default=inf)
        self.queue: deque[tuple[int, Any, int]] = deque()  # bytes, and who takes them
        self.message: tuple[Any, int] | None = None  # under way
        self.left = 0.0  # bytes of it, at `since`
        self.since = 0.0
        self.rate = 0.0
        self.due = inf  # when it ends at this rate


def neighbours(channels: Iterable[Channel]) -> tuple[list[Flow], list[Channel]]:
    """All flows and channels whose rates depend on these channels."""
    reached = dict.fromkeys(channels)
    to_visit = list(reached)
    flows: dict[Flow, None] = {}
    while to_visit:
        for flow in to_visit.pop().flows:
            if flow not in flows:
                flows[flow] = None
                for channel in flow.channels:
                    if channel not in reached:
                        reached[channel] = None
                        to_visit.append(channel)
    return list(flows), list(reached)


def fair_rates(flows: list[Flow], channels: list[Channel]) -> dict[Flow, float]:
    """Of flows that cross no other channels than these."""
    rates: dict[Flow, float] = {}
    for channel in channels:
        channel.open = len(channel.flows)
        channel.room = channel.capacity(channel.open) if channel.open else 0.0
    levels = [(c.room / c.open, i) for i, c in enumerate(channels) if c.open]
    heapify(levels)
    while levels and len(rates) < len(flows):
        level, i = levels[0]
        channel = channels[i]
        if not channel.open:
            heappop(levels)
            continue
        now = channel.room / channel.open  # others' flows that stay behind leave more
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

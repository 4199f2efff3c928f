"""What the links gave in the last meetings, and whose link it was that gave little.

How long an exchange took says nothing of the network: somebody may have come late. What does is the
time between the first and the last of the messages that a peer had to send from the start
(`execute.Leading`), at the receiver, by one clock.

A link between two ranks is as fast as the slowest of what it crosses: a NIC out, a NIC in, and
between racks an uplink out and one in. Since members take turns, each of these is seen with others,
and at its best it shows what it can do: its rate is the largest of its last few. So a slow host or
rack has nothing better to show, and those who met it have.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from math import inf
from statistics import median
from typing import NamedTuple

from thalweg.runtime.arrivals import Arrival
from thalweg.runtime.engine import AT_ONCE
from thalweg.schedules import Contention, Group, Rates
from thalweg.schedules.contention import SLOW

LOOKED_AT = 5  # turns
SHORTEST = 0.005  # seconds: what comes faster than that is fast enough, and noise


class Seen(NamedTuple):
    """Bytes per second from one rank to another."""

    step: int
    source: int
    target: int
    rate: float


class Way(NamedTuple):
    """Out of a host or a rack, or into it."""

    owner: str
    direction: str


def goodput(rank: int, arrivals: Iterable[Arrival]) -> list[Seen]:
    """What came to this rank, by step and peer."""
    at_once: dict[tuple[int, int], list[tuple[float, float, int]]] = defaultdict(list)
    for arrival in arrivals:
        if arrival.bucket < AT_ONCE:  # these share a link; what comes later has gaps
            for peer, lead in arrival.leading.items():
                at_once[arrival.step, peer].append((lead.began, lead.ended, lead.nbytes))
    seen = []
    for (step, peer), leads in at_once.items():
        began, ended, nbytes = zip(*leads, strict=True)
        if sum(nbytes):
            seconds = max(max(ended) - min(began), SHORTEST)
            seen.append(Seen(step, peer, rank, sum(nbytes) / seconds))
    return seen


class Ways:
    """The last rates of NICs, or of uplinks, each way."""

    def __init__(self) -> None:
        self._rates: dict[Way, deque[float]] = defaultdict(lambda: deque(maxlen=LOOKED_AT))

    def add(self, way: Way, rate: float) -> None:
        self._rates[way].append(rate)

    def best(self) -> dict[str, float]:
        """What each owner has shown in the slower of its two ways."""
        slower: dict[str, float] = {}
        for way, rates in self._rates.items():
            if len(rates) > 1:
                slower[way.owner] = min(max(rates), slower.get(way.owner, inf))
        return slower

    def worst(self, owner: str) -> float:
        """The smallest of its last rates: what it can be relied on for."""
        own = (min(rates) for way, rates in self._rates.items() if way.owner == owner)
        return min(own, default=0.0)

    def usual(self) -> float:
        """What they show mostly; 0 before anything was seen."""
        best = self.best()
        return median(best.values()) if best else 0.0


class Links:
    """All that was seen of a cluster. A slow rate that `apart`, what is known to be slow, explains
    isn't held against whoever else it crossed."""

    def __init__(self, group: Group, apart: Contention) -> None:
        self._group = group
        self.apart = apart
        self.nics = Ways()
        self.uplinks = Ways()

    def add(self, seen: Seen) -> None:
        cluster = self._group.cluster
        source, target = cluster.host(seen.source), cluster.host(seen.target)
        here, there = cluster.rack(seen.source), cluster.rack(seen.target)
        nics = [Way(source.name, "out"), Way(target.name, "in")] if source is not target else []
        uplinks = [Way(here.name, "out"), Way(there.name, "in")] if here is not there else []
        slow_hosts, slow_racks = dict(self.apart.hosts), dict(self.apart.racks)
        crossed = [way.owner in slow_hosts for way in nics]
        crossed += [way.owner in slow_racks for way in uplinks]
        for kind, ways, slow in (
            (self.nics, nics, slow_hosts),
            (self.uplinks, uplinks, slow_racks),
        ):
            explained = any(crossed) and seen.rate < SLOW * kind.usual()
            for way in ways:
                if not explained or way.owner in slow:
                    kind.add(way, seen.rate)

    def rates(self) -> Rates | None:
        """None before all hosts were seen."""
        nics = self.nics.best()
        names = {self._group.cluster.host(rank).name for rank in self._group.ranks}
        return None if names - set(nics) else Rates(nics=nics, uplinks=self.uplinks.best())

"""Adjustment of averaging groups while training: contended links are separated until they recover.

After each step every rank publishes the goodput of its links in the store. One rank, the leader,
evaluates them (`schedules.contention`) and proposes the contended links through the agreement, so
that all ranks switch to the new group table at the same step.

A table doesn't flap. A link counts as slow when all of its last few rates were, and as recovered
when all of them are near the median again and a cooldown has passed; the cooldown doubles if the
link becomes slow again soon after.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

from thalweg.engine.arrivals import Arrival, Arrivals
from thalweg.facts import Host, Rack
from thalweg.members.agreement import Agreement, Json
from thalweg.members.world import World
from thalweg.schedules import ContendedLinks, Group, Rates, contended_links
from thalweg.schedules.shuffle.contended_links import (
    CONTENDED_RATE_RATIO,
    MAX_WINDOW_STEPS,
    in_pairs,
)
from thalweg.steps import MAX_CHAINS_IN_FLIGHT

CONTENTION_CHANGE = "contention"  # in the agreement
RECOVERED_RATE_RATIO = 0.85  # of the median rate
COOLDOWN_STEPS, MAX_COOLDOWN_STEPS = 24, 2000  # for which a link stays contended at least
SOON_COOLDOWN_FACTOR = 4  # times the cooldown
BUSY_WINDOW_STEPS = 5
RATE_WINDOW_TURNS = 5
MIN_GOODPUT_SECONDS = 0.005  # shorter transfers are fast enough, and noisy


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """The links that count as contended from `step` on."""

    step: int
    kept_apart: str
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.kept_apart} ({self.reason})"


def agreed_contention(value: Json) -> tuple[ContendedLinks, str]:
    """The agreed contended links, and the reason."""
    agreed: Any = value
    racks, hosts = (tuple(sorted(agreed[key].items())) for key in ("racks", "hosts"))
    return ContendedLinks(racks=racks, hosts=hosts, pairs=agreed["pairs"]), agreed["reason"]


class ContentionMonitor:
    """The monitor of one rank. The leader also decides."""

    def __init__(
        self,
        group: Group,
        world: World,
        agreement: Agreement,
        arrivals: Arrivals,
        nbytes: int,
    ) -> None:
        self._world = world
        self._agreement = agreement
        self._arrivals = arrivals
        self._nbytes = nbytes
        self._began = monotonic()  # earlier arrivals were with other members
        leader = min(world.members)
        self._policy = ContentionPolicy(group) if world.rank == leader else None
        self._keys = [_key(rank) for rank in world.members]
        world.put(_key(world.rank), json.dumps([0.0, []]))

    def adopt(self, contention: ContendedLinks, step: int) -> None:
        if self._policy is not None:
            self._policy.adopt(contention, step)

    def observe(self, step: int, busy_seconds: float) -> None:
        """Publish this rank's goodput and compute time. Propose another table, on the leader, if
        the present one doesn't suit any more."""
        rank = self._world.rank
        recent = self._arrivals.since(step - 2 * MAX_WINDOW_STEPS)  # with windows that end now
        own_arrivals = (arrival for arrival in recent if arrival.started >= self._began)
        samples = [list(sample) for sample in goodput(rank, own_arrivals)]
        if samples:
            self._world.put(_key(rank), json.dumps([busy_seconds, samples]))
        if self._policy is None:
            return
        published = self._world.store_client.call(
            lambda store: store.multi_get(self._keys) if store.check(self._keys) else None
        )
        if published is None:  # a rank hasn't published yet
            return
        busy, seen = zip(*map(json.loads, published), strict=True)
        for entries in seen:
            self._policy.see(RateSample(*entry) for entry in entries)
        wanted = self._policy.decide(step, median(busy) / self._nbytes)
        if wanted is not None:
            contention, reason = wanted
            self._agreement.propose(
                CONTENTION_CHANGE,
                {
                    "racks": dict(contention.racks),
                    "hosts": dict(contention.hosts),
                    "pairs": contention.pairs,
                    "reason": reason,
                },
            )


class RateSample(NamedTuple):
    """A rate in bytes per second from one rank to another."""

    step: int
    source: int
    target: int
    rate: float


def goodput(rank: int, arrivals: Iterable[Arrival]) -> list[RateSample]:
    """The goodput to this rank by step and peer.

    The duration of an exchange doesn't measure the network, as a peer may have started late. The
    goodput is that between the first and the last of the messages that a peer could send from the
    start (`execute.Leading`), at the receiver, by one clock.
    """
    at_once: dict[tuple[int, int], list[tuple[float, float, int]]] = defaultdict(list)
    for arrival in arrivals:
        if arrival.bucket < MAX_CHAINS_IN_FLIGHT:  # these share a link; later ones have gaps
            for peer, lead in arrival.leading.items():
                at_once[arrival.step, peer].append((lead.began, lead.ended, lead.nbytes))
    seen = []
    for (step, peer), leads in at_once.items():
        began, ended, nbytes = zip(*leads, strict=True)
        if sum(nbytes):
            seconds = max(max(ended) - min(began), MIN_GOODPUT_SECONDS)
            seen.append(RateSample(step, peer, rank, sum(nbytes) / seconds))
    return seen


class DirectionRates:
    """The last rates of NICs, or of uplinks, in each direction: out of a host or a rack, or into
    it."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str, str], deque[float]] = defaultdict(
            lambda: deque(maxlen=RATE_WINDOW_TURNS)
        )

    def add(self, owner: str, direction: str, rate: float) -> None:
        self._rates[owner, direction].append(rate)

    def best(self) -> dict[str, float]:
        """The best rate of each owner in the slower of its two directions."""
        slower: dict[str, float] = {}
        for (owner, _), rates in self._rates.items():
            if len(rates) > 1:
                slower[owner] = min(max(rates), slower.get(owner, inf))
        return slower

    def worst(self, owner: str) -> float:
        """The smallest of the owner's last rates, which can be relied on."""
        own = (min(rates) for (name, _), rates in self._rates.items() if name == owner)
        return min(own, default=0.0)

    def median(self) -> float:
        """The median of the best rates; 0 before the first sample."""
        best = self.best()
        return median(best.values()) if best else 0.0


class LinkRateEstimator:
    """The rates of all NICs and uplinks of a cluster. A slow rate that is explained by `apart`, the
    known contended links, doesn't count against the other links on its path.

    A path between two ranks is as fast as the slowest link on it: a NIC out, a NIC in, and between
    racks an uplink out and one in. Since members take turns, each link is seen with different
    others, and its rate is the largest of its last few. A slow host or rack never shows a better
    one, and the links that it was paired with do.
    """

    def __init__(self, group: Group, apart: ContendedLinks) -> None:
        self._group = group
        self.contended = apart
        self.nics = DirectionRates()
        self.uplinks = DirectionRates()

    def add(self, seen: RateSample) -> None:
        cluster = self._group.cluster
        path = [
            (kind, _crossed(owner_of(seen.source), owner_of(seen.target)), dict(slow))
            for kind, owner_of, slow in (
                (self.nics, cluster.host, self.contended.hosts),
                (self.uplinks, cluster.rack, self.contended.racks),
            )
        ]
        crosses_slow = any(owner in slow for _, links, slow in path for owner, _ in links)
        for kind, links, slow in path:
            explained = crosses_slow and seen.rate < CONTENDED_RATE_RATIO * kind.median()
            for owner, direction in links:
                if not explained or owner in slow:
                    kind.add(owner, direction, seen.rate)

    def rates(self) -> Rates | None:
        """The rates of all links; None until all hosts were seen."""
        nics = self.nics.best()
        names = {self._group.cluster.host(rank).name for rank in self._group.ranks}
        return None if names - set(nics) else Rates(nics=nics, uplinks=self.uplinks.best())


def _crossed(start: Host | Rack, end: Host | Rack) -> list[tuple[str, str]]:
    """The links that a path between these crosses, by owner and direction; none inside a host or
    rack."""
    return [] if start is end else [(start.name, "out"), (end.name, "in")]


class ContentionPolicy:
    """The decisions of the leader, from the rates of links, the contended ones, and their
    cooldowns."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._links = LinkRateEstimator(group, group.contended)
        self._newest: dict[tuple[int, int], int] = {}  # by source and target
        self._adopted = group.contended
        self._proposed = self._adopted
        self._since = 0
        self._busy: deque[float] = deque(maxlen=BUSY_WINDOW_STEPS)
        self._recovered: dict[str, int] = {}  # the step at which each link recovered
        self._cooldown: dict[str, int] = {}

    def see(self, samples: Iterable[RateSample]) -> None:
        for sample in sorted(samples):
            if sample.step > self._newest.get((sample.source, sample.target), -1):
                self._newest[sample.source, sample.target] = sample.step
                self._links.add(sample)

    def adopt(self, contention: ContendedLinks, step: int) -> None:
        before, now = (dict((*c.racks, *c.hosts)) for c in (self._adopted, contention))
        for name in before.keys() - now.keys():
            self._recovered[name] = step
        for name in now.keys() - before.keys():
            cooldown = self._cooldown.get(name, COOLDOWN_STEPS)
            recovered = self._recovered.get(name)
            soon = recovered is not None and step - recovered < SOON_COOLDOWN_FACTOR * cooldown
            self._cooldown[name] = min(2 * cooldown, MAX_COOLDOWN_STEPS) if soon else COOLDOWN_STEPS
        self._adopted = self._proposed = self._links.contended = contention
        self._since = step

    def decide(self, step: int, busy: float) -> tuple[ContendedLinks, str] | None:
        """Another table than the one that is adopted or proposed, with the reason; None if it
        suits."""
        self._busy.append(busy)
        busy = min(self._busy)  # without evaluations and checkpoints between two steps
        rates = self._links.rates()
        if rates is None:
            return None
        judged = contended_links(self._group, rates, busy, self._adopted)
        links = self._links
        racks = self._settled(self._proposed.racks, judged.racks, links.uplinks, step)
        pairs = in_pairs(self._group, rates, racks, busy, self._adopted)
        wanted = ContendedLinks(
            racks=racks,
            hosts=self._settled(self._proposed.hosts, judged.hosts, links.nics, step),
            pairs=pairs if step - self._since >= COOLDOWN_STEPS else self._adopted.pairs,
        )
        if wanted == self._proposed:  # or adopted, without another proposal since
            return None
        self._proposed = wanted
        return wanted, self._reason(wanted)

    def _settled(
        self,
        proposed: tuple[tuple[str, int], ...],
        judged: tuple[tuple[str, int], ...],
        kind: DirectionRates,
        step: int,
    ) -> tuple[tuple[str, int], ...]:
        """The links to propose. A link that is proposed already isn't withdrawn for a single better
        rate."""
        old, new = dict(proposed), dict(judged)
        adopted = dict((*self._adopted.racks, *self._adopted.hosts))
        settled = {}
        for name in old.keys() | new.keys():
            cooldown = self._cooldown.get(name, COOLDOWN_STEPS) if name in adopted else 0
            rested = step - self._since >= cooldown
            window, before = new.get(name, 1), old.get(name, 1)
            # As fast as the others; or fast enough for a shorter window.
            recovered = window > 1 or kind.worst(name) >= RECOVERED_RATE_RATIO * kind.median()
            if window < before and not (rested and recovered):
                window = before
            if window > 1:
                settled[name] = window
        return tuple(sorted(settled.items()))

    def _reason(self, wanted: ContendedLinks) -> str:
        reasons = []
        for kind, links, slow, adopted in (
            ("uplink", self._links.uplinks, wanted.racks, self._adopted.racks),
            ("NIC", self._links.nics, wanted.hosts, self._adopted.hosts),
        ):
            rates, now, before = links.best(), dict(slow), dict(adopted)
            for name in sorted(now.keys() | before.keys()):
                if now.get(name) != before.get(name):
                    rate = _mbit(rates[name]) if name in rates else "an unknown rate"
                    reasons.append(f"{kind} of {name} at {rate} (median {_mbit(links.median())})")
        if wanted.pairs != self._adopted.pairs:
            slower = "takes much longer than inside them" if wanted.pairs else "has become faster"
            reasons.append(f"an exchange between racks {slower}")
        return "; ".join(reasons) or "the last proposal no longer holds"


def _mbit(rate: float) -> str:
    return f"{rate * 8 / 1e6:.3g} Mbit/s"


def _key(rank: int) -> str:
    return f"seen/{rank}"

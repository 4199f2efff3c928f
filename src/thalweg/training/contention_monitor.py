"""Adjustment while training: who has become slow is kept apart, and who has recovered no longer is.

After each step every rank puts into the store what the links gave it (`goodput`). One of them, the
leader, judges all of it (`schedules.contention`), and proposes what to keep apart through
the agreement, so that all take up the new table of meetings at the same step.

A table doesn't flap. A link counts as slow when its last few rates all were, and as recovered when
all of them are near the usual again and some steps have passed; twice as many the next time, if it
becomes slow again soon after.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

from thalweg.engine.arrivals import Arrival, Arrivals
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
RECOVERED_RATE_RATIO = 0.85  # of the usual rate
CONTENTION_COOLDOWN_STEPS, MAX_CONTENTION_COOLDOWN_STEPS = (
    24,
    2000,
)  # steps for which something stays apart at least
SOON_CONTENTION_COOLDOWN_FACTOR = 4  # times the dwell
BUSY_WINDOW_STEPS = 5  # steps
RATE_WINDOW_TURNS = 5  # turns
MIN_GOODPUT_SECONDS = 0.005  # seconds: what comes faster than that is fast enough, and noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """From `step` on, these are kept apart."""

    step: int
    kept_apart: str
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.kept_apart} ({self.reason})"


def agreed_contention(value: Json) -> tuple[ContendedLinks, str]:
    """What was agreed on, and why."""
    told: Any = value
    racks, hosts = (tuple(sorted(told[key].items())) for key in ("racks", "hosts"))
    return ContendedLinks(racks=racks, hosts=hosts, pairs=told["pairs"]), told["reason"]


class ContentionMonitor:
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
        self._began = monotonic()  # what was before, with other members, says nothing
        leader = min(world.members)
        self._policy = ContentionPolicy(group) if world.rank == leader else None
        self._keys = [_key(rank) for rank in world.members]
        world.put(_key(world.rank), json.dumps([0.0, []]))

    def adopt(self, contention: ContendedLinks, step: int) -> None:
        if self._policy is not None:
            self._policy.adopt(contention, step)

    def publish(self, step: int, busy: float) -> None:
        """What this rank has seen, and how long it computes."""
        rank = self._world.rank
        recent = self._arrivals.since(
            step - 2 * MAX_WINDOW_STEPS
        )  # windows that ended only now included
        ours = (arrival for arrival in recent if arrival.started >= self._began)
        seen = [list(one) for one in goodput(rank, ours)]
        if seen:
            self._world.put(_key(rank), json.dumps([busy, seen]))

    def evaluate(self, step: int) -> None:
        """On the leader: propose another table if this one doesn't suit any more."""
        if self._policy is None:
            return
        told = self._world.store_client.call(
            lambda store: store.multi_get(self._keys) if store.check(self._keys) else None
        )
        if told is None:  # somebody hasn't come so far
            return
        busy, seen = zip(*map(json.loads, told), strict=True)
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
    """Bytes per second from one rank to another."""

    step: int
    source: int
    target: int
    rate: float


class LinkDirection(NamedTuple):
    """Out of a host or a rack, or into it."""

    owner: str
    direction: str


def goodput(rank: int, arrivals: Iterable[Arrival]) -> list[RateSample]:
    """What came to this rank, by step and peer.

    How long an exchange took says nothing of the network: somebody may have come late. What does is
    the time between the first and the last of the messages that a peer had to send from the start
    (`execute.Leading`), at the receiver, by one clock.
    """
    at_once: dict[tuple[int, int], list[tuple[float, float, int]]] = defaultdict(list)
    for arrival in arrivals:
        if arrival.bucket < MAX_CHAINS_IN_FLIGHT:  # these share a link; what comes later has gaps
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
    """The last rates of NICs, or of uplinks, each way."""

    def __init__(self) -> None:
        self._rates: dict[LinkDirection, deque[float]] = defaultdict(
            lambda: deque(maxlen=RATE_WINDOW_TURNS)
        )

    def add(self, direction: LinkDirection, rate: float) -> None:
        self._rates[direction].append(rate)

    def best(self) -> dict[str, float]:
        """What each owner has shown in the slower of its two ways."""
        slower: dict[str, float] = {}
        for direction, rates in self._rates.items():
            if len(rates) > 1:
                slower[direction.owner] = min(max(rates), slower.get(direction.owner, inf))
        return slower

    def worst(self, owner: str) -> float:
        """The smallest of its last rates: what it can be relied on for."""
        own = (min(rates) for direction, rates in self._rates.items() if direction.owner == owner)
        return min(own, default=0.0)

    def median(self) -> float:
        """What they show mostly; 0 before anything was seen."""
        best = self.best()
        return median(best.values()) if best else 0.0


class LinkRateEstimator:
    """All that was seen of a cluster. A slow rate that `apart`, what is known to be slow, explains
    isn't held against whoever else it crossed.

    A link between two ranks is as fast as the slowest of what it crosses: a NIC out, a NIC in, and
    between racks an uplink out and one in. Since members take turns, each of these is seen with
    others, and at its best it shows what it can do: its rate is the largest of its last few. So a
    slow host or rack has nothing better to show, and those who met it have.
    """

    def __init__(self, group: Group, apart: ContendedLinks) -> None:
        self._group = group
        self.contended = apart
        self.nics = DirectionRates()
        self.uplinks = DirectionRates()

    def add(self, seen: RateSample) -> None:
        cluster = self._group.cluster
        source, target = cluster.host(seen.source), cluster.host(seen.target)
        here, there = cluster.rack(seen.source), cluster.rack(seen.target)
        nics = (
            [LinkDirection(source.name, "out"), LinkDirection(target.name, "in")]
            if source is not target
            else []
        )
        uplinks = (
            [LinkDirection(here.name, "out"), LinkDirection(there.name, "in")]
            if here is not there
            else []
        )
        slow_hosts, slow_racks = dict(self.contended.hosts), dict(self.contended.racks)
        crossed = [direction.owner in slow_hosts for direction in nics]
        crossed += [direction.owner in slow_racks for direction in uplinks]
        for kind, directions, slow in (
            (self.nics, nics, slow_hosts),
            (self.uplinks, uplinks, slow_racks),
        ):
            explained = any(crossed) and seen.rate < CONTENDED_RATE_RATIO * kind.median()
            for direction in directions:
                if not explained or direction.owner in slow:
                    kind.add(direction, seen.rate)

    def rates(self) -> Rates | None:
        """None before all hosts were seen."""
        nics = self.nics.best()
        names = {self._group.cluster.host(rank).name for rank in self._group.ranks}
        return None if names - set(nics) else Rates(nics=nics, uplinks=self.uplinks.best())


class ContentionPolicy:
    """The leader's: what the links gave, what is kept apart, and since when."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._links = LinkRateEstimator(group, group.contended)
        self._newest: dict[tuple[int, int], int] = {}  # by source and target
        self._adopted = group.contended
        self._proposed = self._adopted
        self._since = 0
        self._busy: deque[float] = deque(maxlen=BUSY_WINDOW_STEPS)
        self._left: dict[str, int] = {}  # when what was kept apart was let back
        self._dwell: dict[str, int] = {}

    def see(self, seen: Iterable[RateSample]) -> None:
        for one in sorted(seen):
            if one.step > self._newest.get((one.source, one.target), -1):
                self._newest[one.source, one.target] = one.step
                self._links.add(one)

    def adopt(self, contention: ContendedLinks, step: int) -> None:
        before, now = (dict((*c.racks, *c.hosts)) for c in (self._adopted, contention))
        for name in before.keys() - now.keys():
            self._left[name] = step
        for name in now.keys() - before.keys():
            dwell = self._dwell.get(name, CONTENTION_COOLDOWN_STEPS)
            soon = (
                step
                - self._left.get(
                    name, -MAX_CONTENTION_COOLDOWN_STEPS * SOON_CONTENTION_COOLDOWN_FACTOR
                )
                < SOON_CONTENTION_COOLDOWN_FACTOR * dwell
            )
            self._dwell[name] = (
                min(2 * dwell, MAX_CONTENTION_COOLDOWN_STEPS) if soon else CONTENTION_COOLDOWN_STEPS
            )
        self._adopted = self._proposed = self._links.contended = contention
        self._since = step

    def decide(self, step: int, busy: float) -> tuple[ContendedLinks, str] | None:
        """Another table than the one that is adopted or proposed, and why."""
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
            pairs=pairs if step - self._since >= CONTENTION_COOLDOWN_STEPS else self._adopted.pairs,
        )
        if wanted == self._proposed:  # or adopted, if nothing else was proposed since
            return None
        self._proposed = wanted
        return wanted, self._reason(wanted, rates.nics, rates.uplinks)

    def _settled(
        self,
        proposed: tuple[tuple[str, int], ...],
        judged: tuple[tuple[str, int], ...],
        ways: DirectionRates,
        step: int,
    ) -> tuple[tuple[str, int], ...]:
        """What is proposed already isn't withdrawn for a single better rate either."""
        old, new = dict(proposed), dict(judged)
        adopted = dict((*self._adopted.racks, *self._adopted.hosts))
        settled = {}
        for name in old.keys() | new.keys():
            dwell = self._dwell.get(name, CONTENTION_COOLDOWN_STEPS) if name in adopted else 0
            rested = step - self._since >= dwell
            pace, was = new.get(name, 1), old.get(name, 1)
            if pace < was and not (rested and self._has_recovered(name, pace, ways)):
                pace = was
            if pace > 1:
                settled[name] = pace
        return tuple(sorted(settled.items()))

    def _has_recovered(self, name: str, pace: int, ways: DirectionRates) -> bool:
        """As well as the others; or for a shorter window, which it has been judged by its best."""
        return pace > 1 or ways.worst(name) >= RECOVERED_RATE_RATIO * ways.median()

    def _reason(
        self, wanted: ContendedLinks, nics: Mapping[str, float], uplinks: Mapping[str, float]
    ) -> str:
        said = []
        kinds: list[tuple[str, dict[str, int], dict[str, int], Mapping[str, float], float]] = [
            ("uplink", dict(wanted.racks), dict(self._adopted.racks), uplinks, _usual(uplinks)),
            ("NIC", dict(wanted.hosts), dict(self._adopted.hosts), nics, _usual(nics)),
        ]
        for kind, now, before, rates, usual in kinds:
            for name in sorted(now.keys() | before.keys()):
                if now.get(name) != before.get(name):
                    gives = _mbit(rates[name]) if name in rates else "what isn't known yet"
                    said.append(f"the {kind} of {name} gives {gives}, usual is {_mbit(usual)}")
        if wanted.pairs != self._adopted.pairs:
            slower = "takes much longer than inside them" if wanted.pairs else "has become faster"
            said.append(f"an exchange between racks {slower}")
        return "; ".join(said) or "what was proposed meanwhile no longer holds"


def _usual(rates: Mapping[str, float]) -> float:
    return median(rates.values()) if rates else 0.0


def _mbit(rate: float) -> str:
    return f"{rate * 8 / 1e6:.3g} Mbit/s"


def _key(rank: int) -> str:
    return f"seen/{rank}"

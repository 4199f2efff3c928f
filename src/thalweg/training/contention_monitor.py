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
from thalweg.engine.engine import AT_ONCE
from thalweg.members.agreement import Agreement, Json
from thalweg.members.world import World
from thalweg.schedules import Contention, Group, Rates, judge
from thalweg.schedules.shuffle.contended_links import LONGEST, SLOW, in_pairs

CHANGE = "contention"  # in the agreement
RECOVERED = 0.85  # of the usual rate
DWELL, LONGEST_DWELL = 24, 2000  # steps for which something stays apart at least
SOON = 4  # times the dwell
BUSY_LOOKED_AT = 5  # steps
LOOKED_AT = 5  # turns
SHORTEST = 0.005  # seconds: what comes faster than that is fast enough, and noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """From `step` on, these are kept apart."""

    step: int
    kept_apart: str
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.kept_apart} ({self.reason})"


def contention_in(value: Json) -> tuple[Contention, str]:
    """What was agreed on, and why."""
    told: Any = value
    racks, hosts = (tuple(sorted(told[key].items())) for key in ("racks", "hosts"))
    return Contention(racks=racks, hosts=hosts, pairs=told["pairs"]), told["reason"]


class Watch:
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
        self._judge = Judge(group) if world.rank == leader else None
        self._keys = [_key(rank) for rank in world.members]
        world.put(_key(world.rank), json.dumps([0.0, []]))

    def adopt(self, contention: Contention, step: int) -> None:
        if self._judge is not None:
            self._judge.adopt(contention, step)

    def tell(self, step: int, busy: float) -> None:
        """What this rank has seen, and how long it computes."""
        rank = self._world.rank
        recent = self._arrivals.since(step - 2 * LONGEST)  # windows that ended only now included
        ours = (arrival for arrival in recent if arrival.started >= self._began)
        seen = [list(one) for one in goodput(rank, ours)]
        if seen:
            self._world.put(_key(rank), json.dumps([busy, seen]))

    def look(self, step: int) -> None:
        """On the leader: propose another table if this one doesn't suit any more."""
        if self._judge is None:
            return
        told = self._world.line.ask(
            lambda store: store.multi_get(self._keys) if store.check(self._keys) else None
        )
        if told is None:  # somebody hasn't come so far
            return
        busy, seen = zip(*map(json.loads, told), strict=True)
        for entries in seen:
            self._judge.see(Seen(*entry) for entry in entries)
        wanted = self._judge.decide(step, median(busy) / self._nbytes)
        if wanted is not None:
            contention, reason = wanted
            self._agreement.propose(
                CHANGE,
                {
                    "racks": dict(contention.racks),
                    "hosts": dict(contention.hosts),
                    "pairs": contention.pairs,
                    "reason": reason,
                },
            )


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
    """What came to this rank, by step and peer.

    How long an exchange took says nothing of the network: somebody may have come late. What does is
    the time between the first and the last of the messages that a peer had to send from the start
    (`execute.Leading`), at the receiver, by one clock.
    """
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
    isn't held against whoever else it crossed.

    A link between two ranks is as fast as the slowest of what it crosses: a NIC out, a NIC in, and
    between racks an uplink out and one in. Since members take turns, each of these is seen with
    others, and at its best it shows what it can do: its rate is the largest of its last few. So a
    slow host or rack has nothing better to show, and those who met it have.
    """

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


class Judge:
    """The leader's: what the links gave, what is kept apart, and since when."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._links = Links(group, group.contended)
        self._newest: dict[tuple[int, int], int] = {}  # by source and target
        self._adopted = group.contended
        self._proposed = self._adopted
        self._since = 0
        self._busy: deque[float] = deque(maxlen=BUSY_LOOKED_AT)
        self._left: dict[str, int] = {}  # when what was kept apart was let back
        self._dwell: dict[str, int] = {}

    def see(self, seen: Iterable[Seen]) -> None:
        for one in sorted(seen):
            if one.step > self._newest.get((one.source, one.target), -1):
                self._newest[one.source, one.target] = one.step
                self._links.add(one)

    def adopt(self, contention: Contention, step: int) -> None:
        before, now = (dict((*c.racks, *c.hosts)) for c in (self._adopted, contention))
        for name in before.keys() - now.keys():
            self._left[name] = step
        for name in now.keys() - before.keys():
            dwell = self._dwell.get(name, DWELL)
            soon = step - self._left.get(name, -LONGEST_DWELL * SOON) < SOON * dwell
            self._dwell[name] = min(2 * dwell, LONGEST_DWELL) if soon else DWELL
        self._adopted = self._proposed = self._links.apart = contention
        self._since = step

    def decide(self, step: int, busy: float) -> tuple[Contention, str] | None:
        """Another table than the one that is adopted or proposed, and why."""
        self._busy.append(busy)
        busy = min(self._busy)  # without evaluations and checkpoints between two steps
        rates = self._links.rates()
        if rates is None:
            return None
        judged = judge(self._group, rates, busy, self._adopted)
        links = self._links
        racks = self._settled(self._proposed.racks, judged.racks, links.uplinks, step)
        pairs = in_pairs(self._group, rates, racks, busy, self._adopted)
        wanted = Contention(
            racks=racks,
            hosts=self._settled(self._proposed.hosts, judged.hosts, links.nics, step),
            pairs=pairs if step - self._since >= DWELL else self._adopted.pairs,
        )
        if wanted == self._proposed:  # or adopted, if nothing else was proposed since
            return None
        self._proposed = wanted
        return wanted, self._reason(wanted, rates.nics, rates.uplinks)

    def _settled(
        self,
        proposed: tuple[tuple[str, int], ...],
        judged: tuple[tuple[str, int], ...],
        ways: Ways,
        step: int,
    ) -> tuple[tuple[str, int], ...]:
        """What is proposed already isn't withdrawn for a single better rate either."""
        old, new = dict(proposed), dict(judged)
        adopted = dict((*self._adopted.racks, *self._adopted.hosts))
        settled = {}
        for name in old.keys() | new.keys():
            dwell = self._dwell.get(name, DWELL) if name in adopted else 0
            rested = step - self._since >= dwell
            pace, was = new.get(name, 1), old.get(name, 1)
            if pace < was and not (rested and self._has_recovered(name, pace, ways)):
                pace = was
            if pace > 1:
                settled[name] = pace
        return tuple(sorted(settled.items()))

    def _has_recovered(self, name: str, pace: int, ways: Ways) -> bool:
        """As well as the others; or for a shorter window, which it has been judged by its best."""
        return pace > 1 or ways.worst(name) >= RECOVERED * ways.usual()

    def _reason(
        self, wanted: Contention, nics: Mapping[str, float], uplinks: Mapping[str, float]
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

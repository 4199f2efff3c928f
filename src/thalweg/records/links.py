"""Whose link is slow, from what flows between hosts got in the same steps.

A flow crosses a NIC out and a NIC in, and between racks an uplink out and one in: its *ways*. Its
rate is what the kernel delivered while something was under way, so a flow that waits for its sender
or its receiver isn't slow. In one step

    a way gave       the bytes of all flows through it, over the longest time that one was busy
    a flow may want  the least, over its ways, of what a way can give / the flows through it
    a flow is slow   if it got less than 0.6 of that

and what a way can give is the most of: what others of its kind gave (the upper quartile), what
itself gave at its best before, and what the cluster's file declares, reckoned as the other NICs
reach theirs.

A slow way slows down all flows through it, and every flow that it slows crosses others, which are
innocent: so a way is suspected if three quarters of the flows through it were slow in its last
three steps, and it gave too little in all of them. Of the suspects, the host or rack that explains
most slow flows is named, then the one that explains most of those that are left. If two explain the
same, as the uplinks of two racks do, who takes longer to reach the store decides, since its
messages wait in the queue before the slow link; if that doesn't tell either, both are named.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from thalweg.facts import Cluster, Link
from thalweg.records.record import Flow

SLOW, GOOD = 0.6, 0.75  # of what a flow may want, and a way can give
MOST = 0.75  # of the flows through a way
LOOKED_AT = 3  # steps of a way
LONGEST_AGO = 40  # steps
LEAST_NBYTES, LEAST_BUSY = 1 << 17, 0.002  # of a flow that tells something; bytes and seconds
SUSTAINED = 5  # steps, for what a way gave at its best
UPPER = 75  # percentile
KINDS_TO_COMPARE = 3  # owners of a kind
QUEUED, TIMES_USUAL = 0.005, 4.0  # to the store: seconds more than usual, and times as long
Owner = tuple[str, str]
"""`nic` and a host, or `uplink` and a rack."""


class Seen(NamedTuple):
    """A flow in a step."""

    step: int
    source: int
    flow: Flow
    ways: tuple[Link, ...]
    sharers: tuple[int, ...]  # flows through each of its ways

    @property
    def pair(self) -> tuple[int, int]:
        return self.source, self.flow.peer


@dataclass(frozen=True, slots=True)
class Blamed:
    """`owners` are several if nothing tells which of them it is; rates are in bytes per second,
    `seconds` what the slow flows took longer, in a step."""

    owners: tuple[Owner, ...]
    gives: float
    usual: float
    pairs: tuple[tuple[int, int], ...]
    seconds: float
    since: int


class Links:
    """`declared` are rates that somebody has measured or stated, in bytes per second."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._declared = _declared(cluster)
        self._flows: dict[Link, deque[list[Seen]]] = defaultdict(lambda: deque(maxlen=LOOKED_AT))
        self._given: dict[Link, deque[float]] = defaultdict(lambda: deque(maxlen=SUSTAINED))
        self._best: dict[Link, float] = {}
        self._newest = 0

    def forget(self) -> None:
        """Other members, or another plan: what ways can give is still known."""
        self._flows.clear()
        self._given.clear()

    def add(self, step: int, flows: Iterable[tuple[int, Flow]]) -> None:
        """All flows of a step, with the ranks that they came from."""
        self._newest = max(self._newest, step)
        told = [
            (source, flow, self._cluster.path(source, flow.peer))
            for source, flow in flows
            if flow.nbytes >= LEAST_NBYTES and flow.busy >= LEAST_BUSY
        ]
        through: dict[Link, list[int]] = defaultdict(list)
        for number, (_, _, ways) in enumerate(told):
            for way in ways:
                through[way].append(number)
        seen = [
            Seen(step, source, flow, ways, tuple(len(through[way]) for way in ways))
            for source, flow, ways in told
        ]
        for way, numbers in through.items():
            self._flows[way].append([seen[number] for number in numbers])
            self._given[way].append(_gave(seen[number] for number in numbers))
            if len(self._given[way]) == SUSTAINED:
                self._best[way] = max(self._best.get(way, 0.0), median(self._given[way]))

    def blamed(self, store: Mapping[int, float], named: Collection[Owner] = ()) -> list[Blamed]:
        """Whose links are slow; `store` is how long each rank takes to reach it, and `named` are
        those that were, who have to be good again to be let off."""
        recent = {
            way: [flows for flows in looked_at if flows[0].step >= self._newest - LONGEST_AGO]
            for way, looked_at in self._flows.items()
        }
        recent = {way: looked_at for way, looked_at in recent.items() if looked_at}
        can_give = self._can_give(recent)
        suspects: dict[Owner, dict[tuple[int, int], list[Seen]]] = defaultdict(dict)
        for way, looked_at in recent.items():
            owner = (way.kind, way.owner)
            limit = GOOD if owner in named else SLOW
            for seen in self._slowed(way, looked_at, can_give, limit):
                suspects[owner].setdefault(seen.pair, []).append(seen)
        return self._explained(suspects, can_give, store)

    def _slowed(
        self,
        way: Link,
        looked_at: Sequence[Sequence[Seen]],
        can_give: Mapping[Link, float],
        limit: float,
    ) -> list[Seen]:
        """The slow flows through it, if it is suspected."""
        gave = max(map(_gave, looked_at))
        if len(looked_at) < LOOKED_AT or gave >= limit * can_give[way]:
            return []
        flows = [seen for flows in looked_at for seen in flows]
        shares = [_got(seen, can_give) for seen in flows]
        slow = [seen for seen, share in zip(flows, shares, strict=True) if share < limit]
        good = sum(share >= GOOD for share in shares)
        return slow if slow and len(slow) >= MOST * (len(slow) + good) else []

    def _can_give(self, recent: Mapping[Link, Sequence[Sequence[Seen]]]) -> dict[Link, float]:
        shown = {way: max(map(_gave, looked_at)) for way, looked_at in recent.items()}
        usual: dict[str, float] = {}
        for kind in ("nic", "uplink"):
            of_kind = {way: rate for way, rate in shown.items() if way.kind == kind}
            if len({way.owner for way in of_kind}) >= KINDS_TO_COMPARE:
                usual[kind] = float(np.percentile([*of_kind.values()], UPPER))
        reached = [shown[w] / self._declared[w] for w in shown if w in self._declared]
        scale = min(1.0, float(np.percentile(reached, UPPER))) if reached else 0.0
        return {
            way: max(
                rate,
                min(usual.get(way.kind, 0.0), self._declared.get(way, np.inf)),
                self._best.get(way, 0.0),
                scale * self._declared.get(way, 0.0),
            )
            for way, rate in shown.items()
        }

    def _explained(
        self,
        suspects: Mapping[Owner, Mapping[tuple[int, int], list[Seen]]],
        can_give: Mapping[Link, float],
        store: Mapping[int, float],
    ) -> list[Blamed]:
        found: list[Blamed] = []
        left = {pair for flows in suspects.values() for pair in flows}
        while left:
            explains = {owner: left & flows.keys() for owner, flows in suspects.items()}
            most = max(map(len, explains.values()))
            best = [owner for owner, pairs in explains.items() if len(pairs) == most]
            first = explains[best[0]]
            equal = [owner for owner in best if explains[owner] == first]
            owners = self._by_queue(equal, store) if len(equal) > 1 else equal
            flows = [s for pair in sorted(first) for s in suspects[owners[0]][pair]]
            found.append(self._blamed(tuple(owners), flows, can_give))
            left -= first
        return found

    def _by_queue(self, owners: list[Owner], store: Mapping[int, float]) -> list[Owner]:
        """The one whose ranks take much longer than others to reach the store; all of them if
        there is none, or not only one."""
        times = {owner: [store[r] for r in self._ranks(owner) if store.get(r)] for owner in owners}
        known = [seconds for seconds in store.values() if seconds]
        if not known or not all(times.values()):
            return owners
        usual = min(median(seconds) for seconds in (known, *times.values()))
        queued = [
            owner
            for owner, seconds in times.items()
            if median(seconds) > max(usual + QUEUED, TIMES_USUAL * usual)
        ]
        return queued if len(queued) == 1 else owners

    def _ranks(self, owner: Owner) -> tuple[int, ...]:
        kind, name = owner
        if kind == "nic":
            return next(host.ranks for host in self._cluster.hosts if host.name == name)
        return next(rack.ranks for rack in self._cluster.racks if rack.name == name)

    def _blamed(
        self, owners: tuple[Owner, ...], flows: Sequence[Seen], can_give: Mapping[Link, float]
    ) -> Blamed:
        ways = {way for seen in flows for way in seen.ways if (way.kind, way.owner) in owners}
        steps: dict[int, float] = {}  # flows of a step are slow at the same time
        for seen in flows:
            longer = seen.flow.busy * (1 - _got(seen, can_give))
            steps[seen.step] = max(steps.get(seen.step, 0.0), longer)
        return Blamed(
            owners=owners,
            gives=min(self._given[way][-1] for way in ways),
            usual=max(can_give[way] for way in ways),
            pairs=tuple(sorted({seen.pair for seen in flows})),
            seconds=fmean(steps.values()),
            since=min(steps),
        )


def _gave(flows: Iterable[Seen]) -> float:
    """A way, in a step: bytes per second."""
    nbytes, busy = zip(*((seen.flow.nbytes, seen.flow.busy) for seen in flows), strict=True)
    return float(sum(nbytes) / max(busy))


def _got(seen: Seen, can_give: Mapping[Link, float]) -> float:
    """Of what the flow may want."""
    ways = zip(seen.ways, seen.sharers, strict=True)
    return seen.flow.rate / min(can_give[way] / sharers for way, sharers in ways)


def _declared(cluster: Cluster) -> dict[Link, float]:
    """Unless nobody has looked at the cluster."""
    if any(text.endswith("NICs") for text in cluster.assumed):
        return {}
    return {link: rate.bits_per_second / 8 for link, rate in cluster.rates().items()}

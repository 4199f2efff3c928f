"""The detection of slow links, from the rates of flows between hosts in the same steps.

A flow crosses a NIC out and a NIC in, and between racks an uplink out and one in: the *directions*
of links on its path. Its rate is by the kernel's counters while data was in flight, so a flow that
waits for its sender or its receiver isn't slow. In one step

    rate of a direction   the bytes of all flows through it, over the longest time that one was busy
    fair rate of a flow   the least, over its directions, of their baseline / the flows through them

The baseline of a direction is the rate that the cluster's file declares, scaled by what the best
flow of the median rank reaches of it. Without a declared rate it is the median of its kind in their
better directions, in this step and at most the run's median (links let bursts pass, and a rank that
waits for a slow link sends in bursts); or its own median over the run, as far as NICs reach it.

A direction is *suspected* if its rate was below half of the baseline in each of its last three
steps, or below two thirds in seven of the last eight, and if three quarters of the flows through it
were below two thirds of their fair rate; without declared rates, only if it was below 0.4 each
time, and where partners change from step to step, below 0.35, since steps overlap there. A slow
link slows down all flows through it, but each of these crosses others too, which are innocent. So
among the suspects the host or rack is named whose slow flows have recently lost most time; and
then, without all flows that cross it, the next, if any is still suspected and costs at least half
as much, since ranks that wait for a slow link delay the flows of others. If two explain the same,
the one with fewer good flows meanwhile is named. If there is none, as with the uplinks of two
racks, the one with the longer round trip to the store is, since its messages wait in the queue
before the slow link; if that doesn't decide, all are named.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from statistics import fmean, median
from typing import NamedTuple

from thalweg.facts import Cluster, Link, about
from thalweg.observe.records import FlowRecord
from thalweg.observe.straggler import Straggler, StragglerKind

# Of the baseline of a direction, and of the fair rate of a flow.
SLOW_LINK_RATIO, SUSPECT_LINK_RATIO, GOOD_LINK_RATIO = 0.5, 0.67, 0.75
UNDECLARED_SLOW_LINK_RATIO = 0.4  # the first, without declared rates
# The first, if partners change at so many of the steps.
MIXING_SLOW_LINK_RATIO, MIXING_STEP_FRACTION = 0.35, 0.3
MIN_FURTHER_COST_FRACTION = 0.5  # of the cost of the first slow link
# Steps of a direction: the last few, all, and exceptions.
QUICK_LINK_WINDOW_STEPS, LINK_WINDOW_STEPS, MAX_LINK_EXCEPTION_STEPS = 3, 8, 1
SLOW_FLOW_FRACTION = 0.75  # of the flows through a direction
RECENT_FLOW_STEPS = 12  # steps
MAX_LINK_SAMPLE_AGE_STEPS = 40  # steps
# Of a flow that is large enough to count; bytes and seconds.
MIN_FLOW_SAMPLE_BYTES, MIN_FLOW_SAMPLE_SECONDS = 1 << 17, 0.002
LINK_HISTORY_STEPS = 200  # steps of a direction
MIN_LINK_BASELINE_STEPS = 5  # steps that make a baseline
MAX_SLOW_LINK_OWNERS = 3  # owners at once
DECISIVE_GOOD_FLOW_COUNT = 2  # good flows, more than through another
# To the store: seconds more than others, and times as long.
MIN_STORE_QUEUE_SECONDS, STORE_RTT_FACTOR = 0.005, 3.0
OWNER_TEXTS = {"nic": "NIC of", "uplink": "uplink of"}
Owner = tuple[str, str]
"""A link as `nic` and a host, or `uplink` and a rack."""


class FlowSample(NamedTuple):
    """A flow in a step, with the fraction of its expected rate that it reached."""

    step: int
    source: int
    flow: FlowRecord
    directions: tuple[Link, ...]
    got: float

    def crosses(self, owners: Collection[Owner]) -> bool:
        return any((link.kind, link.owner) in owners for link in self.directions)

    @property
    def longer(self) -> float:
        """The additional seconds in comparison with the expected rate."""
        return self.flow.busy * (1 - min(1.0, self.got))


class Limits(NamedTuple):
    """Fractions of a link's rate: slow for a few steps, slow for more steps, and good again."""

    slow: float
    slowish: float
    good: float


class LinkSample(NamedTuple):
    """The fraction of its rate that a link direction reached in a step, and its flows."""

    step: int
    rate: float
    can: float
    flows: tuple[FlowSample, ...]

    def without(self, owners: Collection[Owner]) -> LinkSample | None:
        """The sample of the flows that cross none of these links; None if there are none."""
        if not owners:
            return self
        flows = tuple(seen for seen in self.flows if not seen.crosses(owners))
        if not flows or len(flows) == len(self.flows):
            return self if flows else None
        return LinkSample(self.step, _gave([seen.flow for seen in flows]), self.can, flows)


class SlowLinkDetector:
    """The detector for a cluster, whose measured or declared rates count."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._declared = _declared(cluster)
        self._given: dict[Link, deque[LinkSample]] = defaultdict(
            lambda: deque(maxlen=LINK_WINDOW_STEPS)
        )
        self._lately: deque[list[FlowSample]] = deque(maxlen=RECENT_FLOW_STEPS)
        self._newest: dict[Link, tuple[int, float]] = {}  # the step and the last rate
        # The fraction of the declared rates that each rank's best flow reached, by step.
        self._reached: dict[int, deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=LINK_WINDOW_STEPS)
        )
        self._usual: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LINK_HISTORY_STEPS))
        self._before: dict[Link, deque[float]] = defaultdict(
            lambda: deque(maxlen=LINK_HISTORY_STEPS)
        )
        self._named: set[Owner] = set()

    def add(self, step: int, flows: Iterable[tuple[int, FlowRecord]]) -> None:
        """Add all flows of a step, with the ranks that sent them."""
        told = [
            (source, flow, self._cluster.path(source, flow.peer))
            for source, flow in flows
            if flow.nbytes >= MIN_FLOW_SAMPLE_BYTES and flow.busy >= MIN_FLOW_SAMPLE_SECONDS
        ]
        through: dict[Link, list[int]] = defaultdict(list)
        for number, (_, _, ways) in enumerate(told):
            for link in ways:
                through[link].append(number)
        gave = {link: _gave([told[n][1] for n in numbers]) for link, numbers in through.items()}

        def got(flow: FlowRecord, ways: Sequence[Link], can_give: Mapping[Link, float]) -> float:
            wants = (can_give[link] / len(through[link]) for link in ways if link in can_give)
            return flow.rate / max(min(wants, default=0.0), 1.0)

        if self._declared:
            best: dict[int, float] = {}
            for source, flow, ways in told:
                best[source] = max(best.get(source, 0.0), got(flow, ways, self._declared))
            for source, share in best.items():
                self._reached[source].append((step, share))
        can_give = self._can_give(step, gave)
        seen = [
            FlowSample(step, source, flow, ways, got(flow, ways, can_give))
            for source, flow, ways in told
        ]
        for link, numbers in through.items():
            flows_through = tuple(seen[number] for number in numbers)
            self._given[link].append(LinkSample(step, gave[link], can_give[link], flows_through))
        self._lately.append(seen)

    def _can_give(self, step: int, gave: Mapping[Link, float]) -> dict[Link, float]:
        for link, rate in gave.items():
            self._newest[link] = step, rate
            if (link.kind, link.owner) not in self._named:  # a slow link is no baseline
                self._before[link].append(rate)
        new = {w: rate for w, (at, rate) in self._newest.items() if at > step - RECENT_FLOW_STEPS}
        if self._declared:
            lately = [
                [s for at, s in some if at > step - RECENT_FLOW_STEPS]
                for some in self._reached.values()
            ]
            scale = min(1.0, median([max(shares) for shares in lately if shares] or [1.0]))
            return {w: scale * self._declared.get(w, rate) for w, rate in gave.items()}
        usual = {kind: self._usually(kind, _middle(new, kind)) for kind in ("nic", "uplink")}
        return {w: max(usual[w.kind], min(usual["nic"], self._own(w))) for w in gave}

    def _usually(self, kind: str, now: float) -> float:
        """The baseline rate of links of this kind: the current one, at most the run's median."""
        self._usual[kind].append(now)
        return min(now, median(self._usual[kind]))

    def _own(self, link: Link) -> float:
        """The baseline rate of this link over the run; 0 before it is known."""
        before = self._before[link]
        return median(before) if len(before) >= MIN_LINK_BASELINE_STEPS else 0.0

    def slow_links(self, store: Mapping[int, float]) -> list[Straggler]:
        """The slow links; `store` is the round-trip time of each rank to the store. Their cost is
        what it would be if compute time hid nothing of it."""
        found: list[Straggler] = []
        explained: list[Owner] = []
        limits = self._limits()
        while len(found) < MAX_SLOW_LINK_OWNERS:
            ways = self._suspects(explained, limits)
            if not ways:
                break
            slow = [
                seen
                for flows in self._lately
                for seen in flows
                if seen.got < SUSPECT_LINK_RATIO and not seen.crosses(explained)
            ]
            if not slow:  # only long ago
                break
            owners = self._named_of(ways, slow, store)
            blamed = self._straggler(owners, ways, slow)
            if found and blamed.seconds < MIN_FURTHER_COST_FRACTION * found[0].seconds:
                break
            found.append(blamed)
            explained += owners
        self._named = set(explained)
        return found

    def _suspects(self, explained: Collection[Owner], limits: Limits) -> set[Link]:
        newest = max((at for at, _ in self._newest.values()), default=0)
        ways = set()
        for link, given in self._given.items():
            if all(
                one.rate >= GOOD_LINK_RATIO * one.can
                for one in [*given][-MAX_LINK_EXCEPTION_STEPS - 1 :]
            ):
                continue  # most are, and there may be many
            new = (
                one.without(explained)
                for one in given
                if one.step > newest - MAX_LINK_SAMPLE_AGE_STEPS
            )
            if self._is_slow(link, [one for one in new if one is not None], limits):
                ways.add(link)
        return ways

    def _is_slow(self, link: Link, given: Sequence[LinkSample], limits: Limits) -> bool:
        """True if the link is slow; one that was reported stays so until it is good again."""
        quick = limits.good if (link.kind, link.owner) in self._named else limits.slow
        for limit, number, most in (
            (quick, QUICK_LINK_WINDOW_STEPS, 0),
            (limits.slowish, LINK_WINDOW_STEPS, MAX_LINK_EXCEPTION_STEPS),
        ):
            looked_at = given[-number:]
            enough = sum(one.rate >= limit * one.can for one in looked_at)
            if len(looked_at) < number or enough > most:
                continue
            flows = [seen for one in looked_at for seen in one.flows]
            few, good = (
                sum(s.got < SUSPECT_LINK_RATIO for s in flows),
                sum(s.got >= GOOD_LINK_RATIO for s in flows),
            )
            if few and few >= SLOW_FLOW_FRACTION * (few + good):
                return True
        return False

    def _limits(self) -> Limits:
        """The limits for this plan. If partners change from step to step, ranks are at different
        steps, and flows share links with those of other groups."""
        pairs = [{(seen.source, seen.flow.peer) for seen in flows} for flows in self._lately]
        changes = [before != now for before, now in pairwise(pairs)]
        if sum(changes) > MIXING_STEP_FRACTION * len(changes):
            return Limits(MIXING_SLOW_LINK_RATIO, MIXING_SLOW_LINK_RATIO, SLOW_LINK_RATIO)
        if not self._declared:
            return Limits(UNDECLARED_SLOW_LINK_RATIO, UNDECLARED_SLOW_LINK_RATIO, GOOD_LINK_RATIO)
        return Limits(SLOW_LINK_RATIO, SUSPECT_LINK_RATIO, GOOD_LINK_RATIO)

    def _named_of(
        self, ways: set[Link], slow: Sequence[FlowSample], store: Mapping[int, float]
    ) -> tuple[Owner, ...]:
        """The owner of the suspected links whose slow flows took longest."""
        went: dict[Owner, set[int]] = {(link.kind, link.owner): set() for link in ways}
        since = {link: self._slow_since(link) for link in ways}  # what was before had other causes
        for number, seen in enumerate(slow):
            for link in ways.intersection(seen.directions):
                if seen.step >= since[link]:
                    went[link.kind, link.owner].add(number)
        worst = max(went, key=lambda owner: sum(slow[number].longer for number in went[owner]))
        equal = sorted(owner for owner in went if went[owner] == went[worst])
        if len(equal) > 1 and went[worst]:
            equal = self._least_good(equal, min(slow[number].step for number in went[worst]))
        return tuple(self._by_queue(equal, store) if len(equal) > 1 else equal)

    def _least_good(self, owners: Sequence[Owner], since: int) -> list[Owner]:
        """The owners with the fewest good flows meanwhile, as good flows exonerate a link."""
        flows = [seen for some in self._lately for seen in some if seen.step >= since]
        good = {
            owner: sum(seen.got >= GOOD_LINK_RATIO and seen.crosses((owner,)) for seen in flows)
            for owner in owners
        }
        least = min(good.values())
        return [owner for owner in owners if good[owner] < least + DECISIVE_GOOD_FLOW_COUNT]

    def _by_queue(self, owners: list[Owner], store: Mapping[int, float]) -> list[Owner]:
        """The owner whose ranks have a much longer round-trip time to the store than the others';
        all owners if there is none."""
        times = {owner: [store[r] for r in self._ranks(owner) if store.get(r)] for owner in owners}
        if not all(times.values()):
            return owners
        *_, second, first = sorted(owners, key=lambda owner: fmean(times[owner]))
        usual = fmean(times[second])
        queued = fmean(times[first]) > max(
            usual + MIN_STORE_QUEUE_SECONDS, STORE_RTT_FACTOR * usual
        )
        return [first] if queued else owners

    def _ranks(self, owner: Owner) -> tuple[int, ...]:
        kind, name = owner
        if kind == "nic":
            return next(host.ranks for host in self._cluster.hosts if host.name == name)
        return next(rack.ranks for rack in self._cluster.racks if rack.name == name)

    def _straggler(
        self, owners: tuple[Owner, ...], suspects: set[Link], slow: Sequence[FlowSample]
    ) -> Straggler:
        """The straggler for a slow link, which costs the additional time of its flows per step."""
        ways = [link for link in suspects if (link.kind, link.owner) in owners]
        steps: dict[int, float] = {}  # flows of a step are slow at the same time
        for seen in slow:
            if seen.crosses(owners):
                steps[seen.step] = max(steps.get(seen.step, 0.0), seen.longer)
        last = [self._given[link][-1] for link in ways]
        rate, baseline = min(given.rate for given in last), max(given.can for given in last)
        kinds = {kind for kind, _ in owners}
        names = " or ".join(f"{OWNER_TEXTS[kind]} {name}" for kind, name in sorted(owners))
        return Straggler(
            kind=StragglerKind(kinds.pop()) if len(kinds) == 1 else StragglerKind.LINK,
            who=tuple(sorted(name for _, name in owners)),
            ranks=tuple(sorted({rank for owner in owners for rank in self._ranks(owner)})),
            since=min(map(self._slow_since, ways)),
            steps=1.0,
            seconds=fmean(steps.values()) if steps else 0.0,
            share=0.0,
            why=f"{names} at {about(8 * rate, 'bit/s')} (baseline {about(8 * baseline, 'bit/s')})",
        )

    def _slow_since(self, link: Link) -> int:
        """The first of the latest steps in the history at which the link was slow."""
        newest_first = reversed(self._given[link])
        slow = list(takewhile(lambda one: one.rate < GOOD_LINK_RATIO * one.can, newest_first))
        return (slow or [self._given[link][-1]])[-1].step


def _gave(flows: Sequence[FlowRecord]) -> float:
    """The rate of a link direction in a step, in bytes per second."""
    return sum(flow.nbytes for flow in flows) / max(flow.busy for flow in flows)


def _middle(rates: Mapping[Link, float], kind: str) -> float:
    """The median rate of links of a kind in their better direction; 0 if there are none."""
    better: dict[str, float] = {}
    for link, rate in rates.items():
        if link.kind == kind:
            better[link.owner] = max(rate, better.get(link.owner, 0.0))
    return median(better.values()) if better else 0.0


def _declared(cluster: Cluster) -> dict[Link, float]:
    """The declared rate of each link; empty if the cluster's rates are assumed."""
    if any(text.endswith("NICs") for text in cluster.assumed):
        return {}
    return {link: rate.bits_per_second / 8 for link, rate in cluster.rates().items()}

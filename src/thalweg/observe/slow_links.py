"""The detection of slow links, from the rates of flows between hosts in the same steps.

A flow crosses the NIC of its sender outwards and the NIC of its receiver inwards, and between racks
an uplink outwards and one inwards. A `Link` is one of these directions, an `Owner` the host or the
rack whose NIC or uplink it is. Rates are taken from the kernel's counters while data was in flight,
so a flow that waits for its sender or its receiver isn't slow. In one step

    rate of a direction   the bytes of all flows through it / the longest time that one was busy
    fair rate of a flow   the minimum, over its directions, of the baseline / the flows through it

The **baseline** of a direction is, in bytes per second,

- with declared rates: the declared rate, scaled by what ranks reach of it, which is the median over
  the ranks of the fraction that their best recent flow reached, at most 1 (a direction without a
  declared rate has the rate that it reached, so it is never suspected);
- without them: the median over the links of its kind, each in its better direction, and at most the
  median of these medians over the run, since links let bursts pass, and a rank that waits for a
  slow link sends in bursts; or, if that is more, the direction's own median over the run, at most
  the baseline of NICs.

A direction is **suspected** if

- its rate was below 0.5 of the baseline in each of its last three steps, or below 0.67 in seven of
  the last eight. Both limits are 0.4 without declared rates, and 0.35 where partners change from
  step to step, since steps overlap there;
- and at least three quarters of the flows through it in these steps were slow, counting those that
  are clearly slow (below 0.67 of their fair rate) or clearly good (at least 0.75 of it).

A link that has been named stays suspected until it has reached 0.75 of its baseline again, or 0.5
where partners change.

A slow link slows down all flows through it, but each of these crosses healthy links, too. So among
the owners of suspected directions these are **named**:

- the owner whose slow flows have recently lost most time;
- if several owners have exactly these slow flows, the one with fewer good flows meanwhile; if that
  doesn't decide, as with the uplinks of two racks, the one with the longer round trip to the store,
  since its messages wait in the queue before the slow link; if that doesn't decide, all of them;
- without all flows that cross the owners named so far, the next one, if it costs at least half as
  much as the first: ranks that wait for a slow link delay the flows of others.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, pairwise, takewhile
from statistics import fmean, median
from typing import NamedTuple

from thalweg.facts import Cluster, Link, about, grouped
from thalweg.observe.records import FlowRecord
from thalweg.observe.straggler import Straggler, StragglerKind

# Ratios of a direction's rate to its baseline, and of a flow's rate to its fair rate.
SLOW_LINK_RATIO = 0.5  # a direction below it in each of a few steps is suspected
SUSPECT_LINK_RATIO = 0.67  # a flow below it is slow, a direction if it is so in most of more steps
GOOD_LINK_RATIO = 0.75  # a flow or a direction that reaches it is good
UNDECLARED_SLOW_LINK_RATIO = 0.4  # instead of the first two without declared rates
MIXING_SLOW_LINK_RATIO = 0.35  # instead of the first two if partners change from step to step
MIXING_STEP_FRACTION = 0.3  # partners change if they differ from the last step's in more steps
MIN_FURTHER_COST_FRACTION = 0.5  # of the cost of the first slow link, for each further one
QUICK_LINK_WINDOW_STEPS = 3  # steps of a direction in which it must be below the lower ratio
LINK_WINDOW_STEPS = 8  # steps of a direction in which it must be below the higher ratio,
MAX_LINK_EXCEPTION_STEPS = 1  # except for this many of them
SLOW_FLOW_FRACTION = 0.75  # of a direction's flows that are clearly slow or clearly good
RECENT_FLOW_STEPS = 12  # steps whose flows are compared and whose lost time is added up
MAX_LINK_SAMPLE_AGE_STEPS = 40  # a direction without a flow for longer isn't suspected
MIN_FLOW_SAMPLE_BYTES = 1 << 17  # a smaller flow doesn't count,
MIN_FLOW_SAMPLE_SECONDS = 0.002  # nor does a shorter one
LINK_HISTORY_STEPS = 200  # rates of a direction or a kind of links of which the median is taken
MIN_LINK_BASELINE_STEPS = 5  # rates of a direction of which the median is its baseline
MAX_SLOW_LINK_OWNERS = 3  # slow links that are named at once
DECISIVE_GOOD_FLOW_COUNT = 2  # an owner with this many more good flows than another is innocent
MIN_STORE_QUEUE_SECONDS = 0.005  # by which a round trip to the store exceeds the others',
STORE_RTT_FACTOR = 3.0  # and how many times theirs it is, if its messages wait in a queue
OWNER_TEXTS = {"nic": "NIC of", "uplink": "uplink of"}
Owner = tuple[str, str]
"""A link in both directions: `nic` and a host, or `uplink` and a rack."""


class FlowSample(NamedTuple):
    """A flow in a step, with the fraction of its fair rate that it reached."""

    step: int
    source: int  # the rank that sent it
    flow: FlowRecord
    path: tuple[Link, ...]
    fraction: float

    def crosses(self, owners: Collection[Owner]) -> bool:
        return any(_owner(link) in owners for link in self.path)

    @property
    def lost_seconds(self) -> float:
        """The additional seconds in comparison with the fair rate."""
        return self.flow.busy * (1 - min(1.0, self.fraction))


class Limits(NamedTuple):
    """Fractions of a direction's baseline below which it is suspected."""

    few_steps: float
    more_steps: float
    named: float  # in a few steps, for a link that has been named


class LinkSample(NamedTuple):
    """The rate of a link direction in a step and its baseline, in bytes per second, with the flows
    through it."""

    step: int
    rate: float
    baseline: float
    flows: tuple[FlowSample, ...]

    def reaches(self, ratio: float) -> bool:
        """True if the rate is at least this fraction of the baseline."""
        return self.rate >= ratio * self.baseline

    def without(self, owners: Collection[Owner]) -> LinkSample | None:
        """The sample of the flows that cross none of these links; None if there are none."""
        if not owners:
            return self
        flows = tuple(flow for flow in self.flows if not flow.crosses(owners))
        if not flows or len(flows) == len(self.flows):
            return self if flows else None
        return LinkSample(self.step, _rate([sample.flow for sample in flows]), self.baseline, flows)


class SlowLinkDetector:
    """The detector for a cluster, whose measured or declared rates count."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._declared = (  # bytes per second of each direction; empty if nobody has declared them
            {}
            if cluster.rates_are_assumed
            else {link: rate.bits_per_second / 8 for link, rate in cluster.rates().items()}
        )
        self._samples: dict[Link, deque[LinkSample]] = defaultdict(
            lambda: deque(maxlen=LINK_WINDOW_STEPS)
        )
        self._recent_flows: deque[list[FlowSample]] = deque(maxlen=RECENT_FLOW_STEPS)  # by step
        self._last_rates: dict[Link, tuple[int, float]] = {}  # each with its step
        # By rank, the step and the fraction of the declared rate that the rank's best flow reached.
        self._best_fractions: dict[int, deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=LINK_WINDOW_STEPS)
        )
        # The median rate of each kind of links, a value per step.
        self._kind_medians: dict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=LINK_HISTORY_STEPS)
        )
        self._rates: dict[Link, deque[float]] = defaultdict(
            lambda: deque(maxlen=LINK_HISTORY_STEPS)
        )
        self._named: set[Owner] = set()

    def add(self, step: int, flows: Iterable[tuple[int, FlowRecord]]) -> None:
        """Add all flows of a step, with the ranks that sent them."""
        large = [
            (source, flow, self._cluster.path(source, flow.peer))
            for source, flow in flows
            if flow.nbytes >= MIN_FLOW_SAMPLE_BYTES and flow.busy >= MIN_FLOW_SAMPLE_SECONDS
        ]
        flows_through = grouped(  # their indices in `large`
            (link, index) for index, (_, _, path) in enumerate(large) for link in path
        )
        rates = {link: _rate([large[i][1] for i in used]) for link, used in flows_through.items()}

        def fraction(
            flow: FlowRecord, path: Sequence[Link], baselines: Mapping[Link, float]
        ) -> float:
            shares = (baselines[w] / len(flows_through[w]) for w in path if w in baselines)
            return flow.rate / max(min(shares, default=0.0), 1.0)

        if self._declared:
            reached = grouped((s, fraction(flow, path, self._declared)) for s, flow, path in large)
            for source, fractions in reached.items():
                self._best_fractions[source].append((step, max(fractions)))
        baselines = self._baselines(step, rates)
        samples = [
            FlowSample(step, source, flow, path, fraction(flow, path, baselines))
            for source, flow, path in large
        ]
        for link, used in flows_through.items():
            through = tuple(samples[index] for index in used)
            self._samples[link].append(LinkSample(step, rates[link], baselines[link], through))
        self._recent_flows.append(samples)

    def _baselines(self, step: int, rates: Mapping[Link, float]) -> dict[Link, float]:
        """The baseline of each direction whose rate in this step is given."""
        for link, rate in rates.items():
            self._last_rates[link] = step, rate
            if _owner(link) not in self._named:  # a slow link is no baseline
                self._rates[link].append(rate)
        oldest = step - RECENT_FLOW_STEPS
        if self._declared:
            recent = [
                [fraction for at, fraction in fractions if at > oldest]
                for fractions in self._best_fractions.values()
            ]
            best = [max(fractions) for fractions in recent if fractions]
            scale = min(1.0, median(best or [1.0]))
            return {link: scale * self._declared.get(link, rate) for link, rate in rates.items()}
        current = {link: rate for link, (at, rate) in self._last_rates.items() if at > oldest}
        by_kind = {
            kind: self._kind_baseline(kind, _median_rate(current, kind))
            for kind in ("nic", "uplink")
        }
        return {
            link: max(by_kind[link.kind], min(by_kind["nic"], self._own_baseline(link)))
            for link in rates
        }

    def _kind_baseline(self, kind: str, current: float) -> float:
        """The baseline of links of this kind: the current median, at most the run's."""
        self._kind_medians[kind].append(current)
        return min(current, median(self._kind_medians[kind]))

    def _own_baseline(self, link: Link) -> float:
        """The median rate of this direction over the run; 0 before it is known."""
        rates = self._rates[link]
        return median(rates) if len(rates) >= MIN_LINK_BASELINE_STEPS else 0.0

    def slow_links(self, store: Mapping[int, float]) -> list[Straggler]:
        """The slow links; `store` is the round-trip time of each rank to the store. Their cost is
        what it would be if compute time hid nothing of it."""
        stragglers: list[Straggler] = []
        explained: list[Owner] = []
        limits = self._limits()
        while len(stragglers) < MAX_SLOW_LINK_OWNERS:
            suspects = self._suspects(explained, limits)
            if not suspects:
                break
            slow_flows = [
                flow
                for flow in chain(*self._recent_flows)
                if flow.fraction < SUSPECT_LINK_RATIO and not flow.crosses(explained)
            ]
            if not slow_flows:  # the suspects' last flows are older
                break
            owners = self._guilty(suspects, slow_flows, store)
            straggler = self._straggler(owners, suspects, slow_flows)
            if stragglers and (
                straggler.seconds < MIN_FURTHER_COST_FRACTION * stragglers[0].seconds
            ):
                break
            stragglers.append(straggler)
            explained += owners
        self._named = set(explained)
        return stragglers

    def _suspects(self, explained: Collection[Owner], limits: Limits) -> set[Link]:
        """The suspected directions, by the flows that cross none of the `explained` links."""
        newest = max((at for at, _ in self._last_rates.values()), default=0)
        suspects = set()
        for link, samples in self._samples.items():
            last = [*samples][-MAX_LINK_EXCEPTION_STEPS - 1 :]
            if all(sample.reaches(GOOD_LINK_RATIO) for sample in last):
                continue  # to save time: most directions are good, and there may be many
            recent = (
                sample.without(explained)
                for sample in samples
                if sample.step > newest - MAX_LINK_SAMPLE_AGE_STEPS
            )
            if self._is_slow(link, [sample for sample in recent if sample is not None], limits):
                suspects.add(link)
        return suspects

    def _is_slow(self, link: Link, samples: Sequence[LinkSample], limits: Limits) -> bool:
        """True if the direction and most flows through it were slow in its last steps."""
        quick = limits.named if _owner(link) in self._named else limits.few_steps
        for limit, steps, max_exceptions in (
            (quick, QUICK_LINK_WINDOW_STEPS, 0),
            (limits.more_steps, LINK_WINDOW_STEPS, MAX_LINK_EXCEPTION_STEPS),
        ):
            window = samples[-steps:]
            exceptions = sum(sample.reaches(limit) for sample in window)
            if len(window) < steps or exceptions > max_exceptions:
                continue
            fractions = [flow.fraction for sample in window for flow in sample.flows]
            slow = sum(fraction < SUSPECT_LINK_RATIO for fraction in fractions)
            good = sum(fraction >= GOOD_LINK_RATIO for fraction in fractions)
            if slow and slow >= SLOW_FLOW_FRACTION * (slow + good):
                return True
        return False

    def _limits(self) -> Limits:
        """The limits for this plan. If partners change from step to step, ranks are at different
        steps, and flows share links with those of other groups."""
        pairs = [{(flow.source, flow.flow.peer) for flow in flows} for flows in self._recent_flows]
        changes = [before != now for before, now in pairwise(pairs)]
        if sum(changes) > MIXING_STEP_FRACTION * len(changes):
            return Limits(MIXING_SLOW_LINK_RATIO, MIXING_SLOW_LINK_RATIO, SLOW_LINK_RATIO)
        if not self._declared:
            return Limits(UNDECLARED_SLOW_LINK_RATIO, UNDECLARED_SLOW_LINK_RATIO, GOOD_LINK_RATIO)
        return Limits(SLOW_LINK_RATIO, SUSPECT_LINK_RATIO, GOOD_LINK_RATIO)

    def _guilty(
        self, suspects: set[Link], slow_flows: Sequence[FlowSample], store: Mapping[int, float]
    ) -> tuple[Owner, ...]:
        """The owner whose slow flows lost most time; several if nothing tells them apart."""
        # The slow flows of each owner, by index, since one of its suspected directions is slow.
        slow_of: dict[Owner, set[int]] = {_owner(link): set() for link in suspects}
        since = {link: self._slow_since(link) for link in suspects}
        for index, flow in enumerate(slow_flows):
            for link in suspects.intersection(flow.path):
                if flow.step >= since[link]:
                    slow_of[_owner(link)].add(index)
        worst = max(
            slow_of.values(), key=lambda indices: sum(slow_flows[i].lost_seconds for i in indices)
        )
        equal = sorted(owner for owner, indices in slow_of.items() if indices == worst)
        if len(equal) > 1 and worst:
            equal = self._fewest_good_flows(equal, min(slow_flows[index].step for index in worst))
        return tuple(self._longest_queue(equal, store) if len(equal) > 1 else equal)

    def _fewest_good_flows(self, owners: Sequence[Owner], since: int) -> list[Owner]:
        """The owners with the fewest good flows since this step, as good flows exonerate a link."""
        good_flows = [
            flow
            for flow in chain(*self._recent_flows)
            if flow.step >= since and flow.fraction >= GOOD_LINK_RATIO
        ]
        counts = {owner: sum(flow.crosses((owner,)) for flow in good_flows) for owner in owners}
        least = min(counts.values())
        return [owner for owner in owners if counts[owner] < least + DECISIVE_GOOD_FLOW_COUNT]

    def _longest_queue(self, owners: list[Owner], store: Mapping[int, float]) -> list[Owner]:
        """The owner whose ranks have a much longer round-trip time to the store than the others';
        all owners if there is none."""
        times = {owner: [store[r] for r in self._ranks(owner) if store.get(r)] for owner in owners}
        if not all(times.values()):
            return owners
        means = {owner: fmean(times[owner]) for owner in owners}
        *_, second, longest = sorted(owners, key=means.__getitem__)
        least = max(means[second] + MIN_STORE_QUEUE_SECONDS, STORE_RTT_FACTOR * means[second])
        return [longest] if means[longest] > least else owners

    def _ranks(self, owner: Owner) -> tuple[int, ...]:
        kind, name = owner
        places = self._cluster.hosts if kind == "nic" else self._cluster.racks
        return next(place.ranks for place in places if place.name == name)

    def _straggler(
        self, owners: tuple[Owner, ...], suspects: set[Link], slow_flows: Sequence[FlowSample]
    ) -> Straggler:
        """The straggler for a slow link, which costs the additional time of its flows per step."""
        directions = [link for link in suspects if _owner(link) in owners]
        lost = grouped((f.step, f.lost_seconds) for f in slow_flows if f.crosses(owners))
        last = [self._samples[link][-1] for link in directions]
        rate, baseline = min(s.rate for s in last), max(s.baseline for s in last)
        kinds = {kind for kind, _ in owners}
        names = " or ".join(f"{OWNER_TEXTS[kind]} {name}" for kind, name in sorted(owners))
        return Straggler(
            kind=StragglerKind(kinds.pop()) if len(kinds) == 1 else StragglerKind.LINK,
            who=tuple(sorted(name for _, name in owners)),
            ranks=tuple(sorted({rank for owner in owners for rank in self._ranks(owner)})),
            since=min(map(self._slow_since, directions)),
            steps=1.0,
            # The flows of a step are slow at the same time.
            seconds=fmean(map(max, lost.values())) if lost else 0.0,
            share=0.0,
            why=f"{names} at {about(8 * rate, 'bit/s')} (baseline {about(8 * baseline, 'bit/s')})",
        )

    def _slow_since(self, link: Link) -> int:
        """The first of the latest steps in the history at which the direction wasn't good."""
        newest_first = reversed(self._samples[link])
        slow = list(takewhile(lambda sample: not sample.reaches(GOOD_LINK_RATIO), newest_first))
        return (slow or [self._samples[link][-1]])[-1].step


def _owner(link: Link) -> Owner:
    return link.kind, link.owner


def _rate(flows: Sequence[FlowRecord]) -> float:
    """The rate of a direction with these flows in a step, in bytes per second."""
    return sum(flow.nbytes for flow in flows) / max(flow.busy for flow in flows)


def _median_rate(rates: Mapping[Link, float], kind: str) -> float:
    """The median rate of links of a kind in their better direction; 0 if there are none."""
    of_owners = grouped((link.owner, rate) for link, rate in rates.items() if link.kind == kind)
    return median(map(max, of_owners.values())) if of_owners else 0.0

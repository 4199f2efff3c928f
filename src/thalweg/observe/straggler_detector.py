"""The detection of stragglers and their causes, from the reports of all ranks.

Ranks compute, and then wait for one another and for links. The compute time of each is known by its
own clock (`slow_ranks.py`), the rates of links by its kernel (`slow_links.py`). The duration of an
exchange identifies nobody: it is the same for early and for late ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from thalweg.facts import Cluster
from thalweg.observe.records import StepRecord, StepReport, by_step
from thalweg.observe.slow_links import SlowLinkDetector
from thalweg.observe.slow_ranks import SlowRankDetector
from thalweg.observe.straggler import Straggler, StragglerKind

VERDICT_WINDOW_STEPS = 12  # steps
ONE_RANK_VERDICT_COUNT, SEVERAL_RANKS_VERDICT_COUNT = 2, 4  # judgements in a row
MAX_REPORT_LAG_STEPS = 4  # steps that a rank may be behind, until the others' are judged without it
# Of the step time, and seconds: a straggler that costs less isn't reported.
MIN_REPORTED_COST_FRACTION, MIN_REPORTED_COST_SECONDS = 0.05, 0.005


class StragglerDetector:
    """The detector for a run of these `members` on this cluster."""

    def __init__(self, cluster: Cluster, members: Sequence[int]) -> None:
        self._cluster = cluster
        self._seen: dict[int, int] = {}  # the last reported step of each rank
        self._changed = False  # since the last judgement
        self.stragglers: tuple[Straggler, ...] = ()
        self.set_members(members)

    def set_members(self, members: Sequence[int]) -> None:
        """Begin anew with these members, or under another plan."""
        self._members = tuple(members)
        self._slow_ranks = SlowRankDetector(self._cluster)
        self._links = SlowLinkDetector(self._cluster)
        self._open: dict[int, dict[int, StepReport]] = {}  # steps that some ranks haven't reported
        self._lately: deque[tuple[int, float, float]] = deque(maxlen=VERDICT_WINDOW_STEPS)
        self._store: dict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=VERDICT_WINDOW_STEPS // 2)
        )
        self._before: dict[Any, Straggler] = {}  # the stragglers that the last judgement found
        self._times: dict[Any, int] = {}  # the judgements in a row that found it

    @property
    def newest(self) -> int:
        """The last step that any rank reported."""
        return max(self._seen.values(), default=0)

    def see(self, rank: int, reports: Iterable[StepReport]) -> None:
        """Add the reports of a rank in the order of steps; known ones are skipped."""
        for report in reports:
            if rank not in self._members or report.step <= self._seen.get(rank, -1):
                continue
            self._seen[rank] = report.step
            self._changed = True
            self._slow_ranks.add(rank, report)
            self._open.setdefault(report.step, {})[rank] = report
            if report.store:
                self._store[rank].append(report.store)

    def current_stragglers(self) -> tuple[Straggler, ...]:
        """The current stragglers, the costliest first."""
        if not self._changed:
            return self.stragglers
        self._changed = False
        self._close_steps()
        detected = {straggler.key: straggler for straggler in self._found()}
        named = {straggler.key: straggler for straggler in self.stragglers}
        self._times = {key: self._times.get(key, 0) + 1 for key in detected}
        stragglers = [
            candidate
            for key, candidate in detected.items()
            if key in named or self._is_sure(candidate)
        ]
        stragglers += [
            candidate
            for key, candidate in named.items()
            if key not in detected and key in self._before
        ]
        self._before = detected  # a reported straggler is resolved when it isn't found twice
        self.stragglers = tuple(sorted(stragglers, key=lambda straggler: -straggler.seconds))
        return self.stragglers

    def _is_sure(self, straggler: Straggler) -> bool:
        """True if the straggler was found several times in a row; a few times more if it may be one
        of several, as later steps mostly tell them apart."""
        return self._times[straggler.key] >= (
            ONE_RANK_VERDICT_COUNT if len(straggler.who) == 1 else SEVERAL_RANKS_VERDICT_COUNT
        )

    def _found(self) -> Iterator[Straggler]:
        """The stragglers according to the latest steps."""
        since = {each.key: each.since for each in (*self._before.values(), *self.stragglers)}
        ranks = {
            straggler.ranks[0]: straggler.since
            for straggler in self.stragglers
            if straggler.kind is StragglerKind.COMPUTE
        }
        yield from self._slow_ranks.slow(ranks)
        store = {rank: fmean(times) for rank, times in self._store.items()}
        for link in self._links.slow_links(store):
            lately = [figures for figures in self._lately if figures[0] >= link.since]
            _, seconds, exposed = (fmean(figures) for figures in zip(*lately, strict=True))
            lost = min(link.seconds, exposed)  # compute time hides the rest
            if lost >= max(MIN_REPORTED_COST_FRACTION * seconds, MIN_REPORTED_COST_SECONDS):
                begun, share = since.get(link.key, link.since), min(1.0, lost / seconds)
                yield replace(link, since=begun, seconds=lost, share=share)

    def _close_steps(self) -> None:
        """Close the steps that all ranks have reported, or that the others have long passed."""
        for step in sorted(self._open):
            reports = self._open[step]
            if len(reports) < len(self._members) and step > self.newest - MAX_REPORT_LAG_STEPS:
                return
            del self._open[step]
            self._links.add(
                step, [(rank, flow) for rank, one in reports.items() for flow in one.flows]
            )
            self._lately.append(
                (
                    step,
                    fmean(report.seconds for report in reports.values()),
                    fmean(report.exposed for report in reports.values()),
                )
            )


def stragglers_by_step(
    cluster: Cluster,
    ranks: Mapping[int, Iterable[StepRecord]],
    formations: Iterable[tuple[int, Sequence[int]]] = (),
) -> Iterator[tuple[int, tuple[Straggler, ...]]]:
    """The stragglers at each step of a finished run. `formations` are the steps at which members or
    the plan changed, with the members from then on."""
    detector = StragglerDetector(cluster, sorted(ranks))
    coming = deque(sorted(formations))
    for number, steps in by_step(ranks).items():
        while coming and coming[0][0] <= number:
            detector.set_members(coming.popleft()[1])
        for rank, step in steps.items():
            detector.see(rank, [StepReport.of(step)])
        yield number, detector.current_stragglers()

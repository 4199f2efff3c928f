"""The detection of ranks that compute for longer than the others.

    a step of a rank is slow     if its compute time is above the baseline by a tenth of a step, by
                                 five deviations of steps, and by 20 ms: all three
    a rank is a straggler        if half of its last twelve steps were slow, until less than a third
                                 of its last six are; or if it loses a tenth of all time in several
                                 of its last 64, more often than by chance if it were like others

The baseline is the median compute time of all ranks, of an even number the lower one. Compute time
is by a rank's own clock; its waits for other ranks are no part of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import sqrt
from statistics import fmean, median, median_low

from thalweg.facts import MAD_TO_DEVIATION, Cluster, about
from thalweg.observe.records import StepReport
from thalweg.observe.straggler import Straggler, StragglerKind

# The last in seconds.
SLOW_RANK_STEP_FRACTION, SLOW_RANK_DEVIATIONS, MIN_SLOW_RANK_SECONDS = 0.1, 5.0, 0.020
RECENT_WINDOW_STEPS, MIN_RECENT_SLOW_STEPS = 12, 6  # steps
LATEST_WINDOW_STEPS, MIN_LATEST_SLOW_STEPS = 6, 2
# Steps, and how often the rank became slow in them.
OCCASIONAL_WINDOW_STEPS, MIN_SLOW_EPISODE_COUNT = 64, 4
MIN_OCCASIONAL_COST_FRACTION = 0.1
CERTAIN_SLOW_DEVIATIONS = 4.0  # deviations
RANK_WARMUP_STEPS = 2  # first steps of a rank
MIN_RANK_BASELINE_STEPS = 4  # steps of a rank that make a baseline


class SlowRankDetector:
    """The detector, with the latest reports of all ranks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._spans: dict[int, deque[StepReport]] = defaultdict(
            lambda: deque(maxlen=OCCASIONAL_WINDOW_STEPS)
        )
        self._seen: Counter[int] = Counter()  # steps of each rank

    def add(self, rank: int, span: StepReport) -> None:
        self._seen[rank] += 1
        if self._seen[rank] > RANK_WARMUP_STEPS:
            self._spans[rank].append(span)

    def slow(self, named: Mapping[int, int]) -> list[Straggler]:
        """The slow ranks; `named` are the previous ones, with their first slow step."""
        lately = {
            rank: list(spans)[-RECENT_WINDOW_STEPS:]
            for rank, spans in self._spans.items()
            if len(spans) >= MIN_RANK_BASELINE_STEPS
        }
        if len(lately) < 2:
            return []
        usual = median_low(median(s.computing for s in spans) for spans in lately.values())
        step = median(s.seconds for spans in lately.values() for s in spans)
        deviation = MAD_TO_DEVIATION * median(map(_deviation, lately.values()))
        limit = usual + max(
            SLOW_RANK_STEP_FRACTION * step, SLOW_RANK_DEVIATIONS * deviation, MIN_SLOW_RANK_SECONDS
        )
        often = {
            rank: sum(s.computing > limit for s in spans) / len(spans)
            for rank, spans in self._spans.items()
        }
        candidates = (
            self._judged(rank, usual, limit, often, named.get(rank)) for rank in sorted(lately)
        )
        return [slow for slow in candidates if slow is not None]

    def _judged(
        self,
        rank: int,
        usual: float,
        limit: float,
        often: Mapping[int, float],
        since: int | None,
    ) -> Straggler | None:
        spans = list(self._spans[rank])
        recent = spans[-RECENT_WINDOW_STEPS:]
        late = [s for s in recent if s.computing > limit]
        still = (
            sum(s.computing > limit for s in spans[-LATEST_WINDOW_STEPS:]) >= MIN_LATEST_SLOW_STEPS
        )
        if still and (since is not None or len(late) >= MIN_RECENT_SLOW_STEPS):
            return self._straggler(rank, recent, late, usual, since)
        episodes = _episodes(spans, limit)
        late = [s for episode in episodes for s in episode]
        others = (sum(often.values()) - often[rank]) / (len(often) - 1)
        by_chance = max(1.0, len(spans) * others)
        if len(spans) < OCCASIONAL_WINDOW_STEPS / 2 or len(episodes) < MIN_SLOW_EPISODE_COUNT:
            return None
        if len(late) < by_chance + CERTAIN_SLOW_DEVIATIONS * sqrt(by_chance):
            return None
        slow = self._straggler(rank, spans, late, usual, since)
        return slow if slow.share >= MIN_OCCASIONAL_COST_FRACTION else None

    def _straggler(
        self,
        rank: int,
        spans: Sequence[StepReport],
        late: Sequence[StepReport],
        usual: float,
        since: int | None,
    ) -> Straggler:
        lost = sum(s.computing - usual for s in late) / len(spans)
        computing = about(median(s.computing for s in late), "s")
        where = f"rank {rank} on {self._cluster.host(rank).name}"
        return Straggler(
            kind=StragglerKind.COMPUTE,
            who=(str(rank),),
            ranks=(rank,),
            since=late[0].step if since is None else since,
            steps=len(late) / len(spans),
            seconds=lost,
            share=min(1.0, lost / max(fmean(s.seconds for s in spans), 1e-9)),
            why=f"{where}: compute time {computing} (median of all ranks {about(usual, 's')})",
        )


def _episodes(spans: Sequence[StepReport], limit: float) -> list[list[StepReport]]:
    """The runs of consecutive slow steps, except those so long that the rank was slow
    throughout."""
    rows = groupby(spans, key=lambda s: s.computing > limit)
    episodes = (list(row) for late, row in rows if late)
    return [episode for episode in episodes if len(episode) < MIN_RECENT_SLOW_STEPS]


def _deviation(spans: Sequence[StepReport]) -> float:
    middle = median(s.computing for s in spans)
    return median(abs(s.computing - middle) for s in spans)

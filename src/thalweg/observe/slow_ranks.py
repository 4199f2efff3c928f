"""The detection of ranks that compute for longer than the others.

    a step of a rank is late   if it computes for longer than usual, by a tenth of a step, by five
                               deviations of steps, and by 20 ms: all three
    a rank is late             if half of its last twelve steps were, until less than a third of its
                               last six are; or if it loses a tenth of all time in several of its
                               last 64, more often than it would by chance if it were like others

Usual is what the middle rank computes, of an even number the earlier of the two. How long a rank
computes is told by its own clock; whom it waits for is no part of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import sqrt
from statistics import fmean, median, median_low
from typing import NamedTuple

from thalweg.facts.units import MAD_TO_DEVIATION

# The last in seconds.
SLOW_RANK_STEP_FRACTION, SLOW_RANK_DEVIATIONS, MIN_SLOW_RANK_SECONDS = 0.1, 5.0, 0.020
RECENT_WINDOW_STEPS, MIN_RECENT_SLOW_STEPS = 12, 6  # steps
LATEST_WINDOW_STEPS, MIN_LATEST_SLOW_STEPS = 6, 2
# Steps, and how often it became late in them.
OCCASIONAL_WINDOW_STEPS, MIN_SLOW_EPISODE_COUNT = 64, 4
MIN_OCCASIONAL_COST_FRACTION = 0.1
CERTAIN_SLOW_DEVIATIONS = 4.0  # deviations
RANK_WARMUP_STEPS = 2  # first steps of a rank, which set things up
MIN_RANK_BASELINE_STEPS = 4  # steps of a rank that tell what is usual


class Span(NamedTuple):
    step: int
    seconds: float
    computing: float


class SlowRank(NamedTuple):
    """A slow rank, with its compute time and the median of all ranks."""

    rank: int
    since: int
    steps: float
    seconds: float  # lost, a step
    share: float
    computing: float
    median: float


class SlowRankDetector:
    """The detector, with the compute times of all ranks."""

    def __init__(self) -> None:
        self._spans: dict[int, deque[Span]] = {}
        self._warmup_left: dict[int, int] = {}

    def add(self, rank: int, span: Span) -> None:
        left = self._warmup_left.get(rank, RANK_WARMUP_STEPS)
        if left:
            self._warmup_left[rank] = left - 1
        else:
            self._spans.setdefault(rank, deque(maxlen=OCCASIONAL_WINDOW_STEPS)).append(span)

    def forget(self) -> None:
        """Drop the history, as members or the plan have changed."""
        self._spans.clear()
        self._warmup_left.clear()

    def slow(self, named: Mapping[int, int]) -> list[SlowRank]:
        """The slow ranks; `named` are the previous ones, with their first slow step."""
        lately = {rank: list(spans)[-RECENT_WINDOW_STEPS:] for rank, spans in self._spans.items()}
        lately = {
            rank: spans for rank, spans in lately.items() if len(spans) >= MIN_RANK_BASELINE_STEPS
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
        found = (
            self._judged(rank, usual, limit, often, named.get(rank)) for rank in sorted(lately)
        )
        return [slow for slow in found if slow is not None]

    def _judged(
        self,
        rank: int,
        usual: float,
        limit: float,
        often: Mapping[int, float],
        since: int | None,
    ) -> SlowRank | None:
        spans = list(self._spans[rank])
        recent = spans[-RECENT_WINDOW_STEPS:]
        late = [s for s in recent if s.computing > limit]
        still = (
            sum(s.computing > limit for s in spans[-LATEST_WINDOW_STEPS:]) >= MIN_LATEST_SLOW_STEPS
        )
        if still and (since is not None or len(late) >= MIN_RECENT_SLOW_STEPS):
            return _slow(rank, recent, late, usual, since)
        episodes = _episodes(spans, limit)
        late = [s for episode in episodes for s in episode]
        others = (sum(often.values()) - often[rank]) / (len(often) - 1)
        by_chance = max(1.0, len(spans) * others)
        if len(spans) < OCCASIONAL_WINDOW_STEPS / 2 or len(episodes) < MIN_SLOW_EPISODE_COUNT:
            return None
        if len(late) < by_chance + CERTAIN_SLOW_DEVIATIONS * sqrt(by_chance):
            return None
        slow = _slow(rank, spans, late, usual, since)
        return slow if slow.share >= MIN_OCCASIONAL_COST_FRACTION else None


def _slow(
    rank: int, spans: Sequence[Span], late: Sequence[Span], usual: float, since: int | None
) -> SlowRank:
    lost = sum(s.computing - usual for s in late) / len(spans)
    return SlowRank(
        rank=rank,
        since=late[0].step if since is None else since,
        steps=len(late) / len(spans),
        seconds=lost,
        share=min(1.0, lost / max(fmean(s.seconds for s in spans), 1e-9)),
        computing=median(s.computing for s in late),
        median=usual,
    )


def _episodes(spans: Sequence[Span], limit: float) -> list[list[Span]]:
    """The runs of consecutive slow steps, except those so long that the rank was slow
    throughout."""
    rows = groupby(spans, key=lambda s: s.computing > limit)
    episodes = (list(row) for late, row in rows if late)
    return [episode for episode in episodes if len(episode) < MIN_RECENT_SLOW_STEPS]


def _deviation(spans: Sequence[Span]) -> float:
    middle = median(s.computing for s in spans)
    return median(abs(s.computing - middle) for s in spans)

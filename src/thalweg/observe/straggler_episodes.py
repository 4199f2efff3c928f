"""The straggler episodes of a finished run: first and last step, and cost.

A verdict (`judging.py`) looks at the last steps, so it comes some steps after its cause and stays
some steps after it. Here both ends are known: a rank that computes for long was late from the first
step to the last that it computed for longer than usual by half of what the verdict says. What that
cost is added up over all steps between the two.

Verdicts on the same one that are less apart than what a verdict takes are one episode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, median_low
from typing import Any

from thalweg.facts import Cluster, about
from thalweg.observe.records import StepRecord, by_step
from thalweg.observe.slow_ranks import RECENT_WINDOW_STEPS
from thalweg.observe.straggler import Straggler, StragglerKind
from thalweg.observe.straggler_detector import stragglers_by_step

MIN_EPISODE_COST_FRACTION = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerEpisode:
    """One straggler over time. `first` and `last` are steps, both included; `ended` says whether
    the run went on without it. `seconds` are lost per step on average, `total` in all."""

    kind: StragglerKind
    who: tuple[str, ...]
    ranks: tuple[int, ...]
    first: int
    last: int
    ended: bool
    steps: float
    seconds: float
    total: float
    share: float
    why: str

    @property
    def when(self) -> str:
        to = f"to {self.last}" if self.ended else "to the end"
        often = "" if self.steps > 0.95 else f", at {100 * self.steps:.0f} % of the steps"
        return f"from step {self.first} {to}{often}"

    @property
    def cost(self) -> str:
        return f"{about(self.seconds, 's')} per step, {about(self.total, 's')} in all"

    def __str__(self) -> str:
        return f"{self.why} {self.when}; costs {self.cost} ({100 * self.share:.0f} %)"

    def entries(self) -> dict[str, Any]:
        return asdict(self)


def straggler_episodes(
    cluster: Cluster,
    ranks: Mapping[int, Sequence[StepRecord]],
    formations: Iterable[tuple[int, Sequence[int]]] = (),
) -> list[StragglerEpisode]:
    """The episodes of a run, the costliest first."""
    spells: list[list[tuple[int, Straggler]]] = []
    going: dict[Any, list[tuple[int, Straggler]]] = {}
    for number, stragglers in stragglers_by_step(cluster, ranks, formations):
        for each in stragglers:
            spell = going.get(each.key)
            if spell is None or number - spell[-1][0] > RECENT_WINDOW_STEPS:
                spell = going[each.key] = []
                spells.append(spell)
            spell.append((number, each))
    course = _StepSeries.of(ranks)
    found = [_episode(spell, course) for spell in spells]
    return sorted(found, key=lambda each: -each.total)


@dataclass(frozen=True, slots=True)
class _StepSeries:
    """The time of each step, and each rank's compute time above the median in it."""

    seconds: Mapping[int, float]
    beyond: Mapping[int, Mapping[int, float]]

    @classmethod
    def of(cls, ranks: Mapping[int, Sequence[StepRecord]]) -> _StepSeries:
        seconds: dict[int, float] = {}
        beyond: dict[int, dict[int, float]] = {}
        for number, steps in by_step(ranks).items():
            usual = median_low(step.computing for step in steps.values())
            seconds[number] = fmean(step.seconds for step in steps.values())
            beyond[number] = {rank: step.computing - usual for rank, step in steps.items()}
        return cls(seconds, beyond)


def _episode(spell: Sequence[tuple[int, Straggler]], course: _StepSeries) -> StragglerEpisode:
    _, straggler = spell[len(spell) // 2]
    first, last = min(each.since for _, each in spell), spell[-1][0]
    if straggler.kind is StragglerKind.COMPUTE:
        [rank] = straggler.ranks
        least = MIN_EPISODE_COST_FRACTION * median(each.seconds / each.steps for _, each in spell)
        beyond = {
            step: course.beyond[step][rank]
            for step in range(first, last + 1)
            if rank in course.beyond.get(step, {})
        }
        slow = [step for step, more in beyond.items() if more >= least] or [first, last]
        first, last = slow[0], slow[-1]
        between = {step: more for step, more in beyond.items() if first <= step <= last}
        total = sum(more for more in between.values() if more >= least)
        often = len(slow) / max(1, len(between))
    else:
        between = {step: s for step, s in course.seconds.items() if first <= step <= last}
        total = median(each.seconds for _, each in spell) * len(between)
        often = fmean(each.steps for _, each in spell)
    took = sum(course.seconds[step] for step in between)
    return StragglerEpisode(
        kind=straggler.kind,
        who=straggler.who,
        ranks=straggler.ranks,
        first=first,
        last=last,
        ended=max(course.seconds) - last >= RECENT_WINDOW_STEPS,  # some are late now and then
        steps=min(1.0, often),
        seconds=total / max(1, len(between)),
        total=total,
        share=min(1.0, total / took) if took else 0.0,
        why=straggler.why,
    )

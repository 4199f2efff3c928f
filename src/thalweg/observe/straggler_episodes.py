"""Who was late from which step to which, of a run that is over, and what that cost.

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
from thalweg.observe.records import Step, by_step
from thalweg.observe.slow_ranks import LATELY
from thalweg.observe.straggler import Kind, Late
from thalweg.observe.straggler_detector import verdicts

OF_THE_VERDICT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """As in `Late`; `first` and `last` are steps, both included, `ended` whether the run went on
    without it. `seconds` are lost in a step, on average, `total` in all."""

    kind: Kind
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
        often = "" if self.steps > 0.95 else f", at {self.steps:.0%} of the steps"
        return f"from step {self.first} {to}{often}"

    @property
    def cost(self) -> str:
        return f"{about(self.seconds, 's')} a step, {about(self.total, 's')} in all"

    def __str__(self) -> str:
        return f"{self.why}; {self.when}: {self.cost}, {self.share:.0%} of the time"

    def entries(self) -> dict[str, Any]:
        return asdict(self)


def episodes(
    cluster: Cluster,
    ranks: Mapping[int, Sequence[Step]],
    formations: Iterable[tuple[int, Sequence[int]]] = (),
) -> list[Episode]:
    """The costliest first."""
    spells: list[list[tuple[int, Late]]] = []
    going: dict[Any, list[tuple[int, Late]]] = {}
    for number, late in verdicts(cluster, ranks, formations):
        for each in late:
            spell = going.get(each.key)
            if spell is None or number - spell[-1][0] > LATELY:
                spell = going[each.key] = []
                spells.append(spell)
            spell.append((number, each))
    course = _Course.of(ranks)
    found = [_episode(spell, course) for spell in spells]
    return sorted(found, key=lambda each: -each.total)


@dataclass(frozen=True, slots=True)
class _Course:
    """What each step took, and what each rank computed in it beyond what is usual."""

    seconds: Mapping[int, float]
    beyond: Mapping[int, Mapping[int, float]]

    @classmethod
    def of(cls, ranks: Mapping[int, Sequence[Step]]) -> _Course:
        seconds: dict[int, float] = {}
        beyond: dict[int, dict[int, float]] = {}
        for number, steps in by_step(ranks).items():
            usual = median_low(step.computing for step in steps.values())
            seconds[number] = fmean(step.seconds for step in steps.values())
            beyond[number] = {rank: step.computing - usual for rank, step in steps.items()}
        return cls(seconds, beyond)


def _episode(spell: Sequence[tuple[int, Late]], course: _Course) -> Episode:
    _, late = spell[len(spell) // 2]
    first, last = min(each.since for _, each in spell), spell[-1][0]
    if late.kind is Kind.COMPUTE:
        [rank] = late.ranks
        least = OF_THE_VERDICT * median(each.seconds / each.steps for _, each in spell)
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
    return Episode(
        kind=late.kind,
        who=late.who,
        ranks=late.ranks,
        first=first,
        last=last,
        ended=max(course.seconds) - last >= LATELY,  # some are late now and then
        steps=min(1.0, often),
        seconds=total / max(1, len(between)),
        total=total,
        share=min(1.0, total / took) if took else 0.0,
        why=late.why,
    )

"""The report of a run: the time breakdown of each rank, the stragglers, and other events.

The detector (`straggler_detector.py`) uses the last steps, so a straggler is reported some steps
after its cause begins, and until some steps after it ends. In a finished run both ends are known: a
slow rank was a straggler from the first to the last step in which its compute time exceeded the
median by at least half of the reported cost. The total cost is the sum over all steps between the
two.

Reports of the same straggler that are less apart than the detector's window are one episode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, median_low
from typing import Any

from thalweg.errors import ranks_text
from thalweg.facts import Cluster, about, grouped
from thalweg.observe.records import StepRecord, by_step
from thalweg.observe.slow_ranks import RECENT_WINDOW_STEPS
from thalweg.observe.step_totals import StepTotals
from thalweg.observe.straggler import Straggler, StragglerKind
from thalweg.observe.straggler_detector import stragglers_by_step
from thalweg.observe.timeline import RankTimeline, Timeline, cluster_of

MIN_EPISODE_COST_FRACTION = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBreakdown:
    """The mean time breakdown of a rank, in seconds per step. A step is compute time, exposed
    communication and blocking between steps; hidden communication and encoding overlap them."""

    rank: int
    host: str
    rack: str
    steps: int
    seconds: float
    computing: float
    exposed: float
    hidden: float
    encoding: float
    waiting: float
    nbytes: float  # sent to other hosts in a step

    @property
    def share(self) -> float:
        """The fraction of the time that is exposed communication."""
        return self.exposed / self.seconds if self.seconds else 0.0

    @property
    def bits_per_second(self) -> float:
        return 8 * self.nbytes / self.seconds if self.seconds else 0.0

    def entries(self) -> dict[str, Any]:
        entries = asdict(self)
        del entries["nbytes"]
        return {**entries, "share": self.share, "mbps": self.bits_per_second / 1e6}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvent:
    """An event, and the ranks that recorded it."""

    step: int
    topic: str
    text: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"step {self.step}: {self.topic}: {self.text} ({ranks_text(self.ranks)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The report on the steps in `timeline`; stragglers may have begun before them."""

    timeline: Timeline
    cluster: Cluster
    accounts: tuple[RankBreakdown, ...]
    stragglers: tuple[StragglerEpisode, ...]
    notes: tuple[RecordedEvent, ...]

    @property
    def seconds(self) -> float:
        """The mean step time over all ranks, in seconds."""
        steps = sum(account.steps for account in self.accounts)
        return sum(account.seconds * account.steps for account in self.accounts) / max(1, steps)


def run_report(
    run: Timeline,
    *,
    first: int | None = None,
    last: int | None = None,
    cluster: Cluster | None = None,
) -> RunReport:
    """The report on the steps from `first` to `last`, both included. The detection of stragglers
    uses the whole run, since it depends on earlier steps."""
    where = cluster_of(run) if cluster is None else cluster
    for rank in run.rank_timelines:
        where.host(rank)  # raises if the cluster has no such rank
    episodes = _straggler_episodes(where, run.by_rank, run.member_spans)
    part = run.cut(first, last)
    shown = part.steps
    return RunReport(
        timeline=part,
        cluster=where,
        accounts=tuple(
            _account(timeline, run.rank_timelines[rank].steps[0].step)
            for rank, timeline in part.rank_timelines.items()
            if timeline.steps
        ),
        stragglers=tuple(
            episode
            for episode in episodes
            if shown and episode.first <= shown[-1] and episode.last >= shown[0]
        ),
        notes=tuple(_happenings(part.rank_timelines.values())),
    )


def _account(timeline: RankTimeline, warm_up_step: int) -> RankBreakdown:
    """The breakdown without the warm-up step, unless there is no other."""
    totals = StepTotals()
    for step in timeline.steps:
        if step.step != warm_up_step or len(timeline.steps) == 1:
            totals.add(step)
    means: dict[str, Any] = {**totals.each(), "steps": totals.steps}
    waiting = means.pop("settled")
    return RankBreakdown(
        rank=timeline.rank, host=timeline.host, rack=timeline.rack, waiting=waiting, **means
    )


def _straggler_episodes(
    cluster: Cluster,
    ranks: Mapping[int, Sequence[StepRecord]],
    formations: Iterable[tuple[int, Sequence[int]]],
) -> list[StragglerEpisode]:
    """The episodes of a run, the costliest first."""
    spells: list[list[tuple[int, Straggler]]] = []
    going: dict[Any, list[tuple[int, Straggler]]] = {}
    for number, stragglers in stragglers_by_step(cluster, ranks, formations):
        for straggler in stragglers:
            spell = going.get(straggler.key)
            if spell is None or number - spell[-1][0] > RECENT_WINDOW_STEPS:
                spell = going[straggler.key] = []
                spells.append(spell)
            spell.append((number, straggler))
    seconds: dict[int, float] = {}
    excess: dict[int, dict[int, float]] = {}  # compute time above the median
    for number, steps in by_step(ranks).items():
        usual = median_low(step.computing for step in steps.values())
        seconds[number] = fmean(step.seconds for step in steps.values())
        excess[number] = {rank: step.computing - usual for rank, step in steps.items()}
    episodes = [_episode(spell, seconds, excess) for spell in spells]
    return sorted(episodes, key=lambda episode: -episode.total)


def _episode(
    spell: Sequence[tuple[int, Straggler]],
    seconds: Mapping[int, float],
    excess: Mapping[int, Mapping[int, float]],
) -> StragglerEpisode:
    _, straggler = spell[len(spell) // 2]
    first, last = min(each.since for _, each in spell), spell[-1][0]
    if straggler.kind is StragglerKind.COMPUTE:
        [rank] = straggler.ranks
        least = MIN_EPISODE_COST_FRACTION * median(each.seconds / each.steps for _, each in spell)
        beyond = {
            step: excess[step][rank]
            for step in range(first, last + 1)
            if rank in excess.get(step, {})
        }
        slow = [step for step, more in beyond.items() if more >= least] or [first, last]
        first, last = slow[0], slow[-1]
        between = {step: more for step, more in beyond.items() if first <= step <= last}
        total = sum(more for more in between.values() if more >= least)
        often = len(slow) / max(1, len(between))
    else:
        between = {step: s for step, s in seconds.items() if first <= step <= last}
        total = median(each.seconds for _, each in spell) * len(between)
        often = fmean(each.steps for _, each in spell)
    took = sum(seconds[step] for step in between)
    return StragglerEpisode(
        kind=straggler.kind,
        who=straggler.who,
        ranks=straggler.ranks,
        first=first,
        last=last,
        ended=max(seconds) - last >= RECENT_WINDOW_STEPS,  # some straggle occasionally
        steps=min(1.0, often),
        seconds=total / max(1, len(between)),
        total=total,
        share=min(1.0, total / took) if took else 0.0,
        why=straggler.why,
    )


def _happenings(lanes: Iterable[RankTimeline]) -> list[RecordedEvent]:
    """The events in the order of their first record, without stragglers, which have episodes."""
    notes = [(timeline.rank, event) for timeline in lanes for event in timeline.notes]
    ranks_of = grouped(
        ((event.step, event.topic, event.text), rank)
        for rank, event in sorted(notes, key=lambda note: note[1].at)
        if event.topic != "late"
    )
    return [
        RecordedEvent(step=step, topic=topic, text=text, ranks=tuple(sorted(set(ranks))))
        for (step, topic, text), ranks in ranks_of.items()
    ]

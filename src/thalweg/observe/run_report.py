"""The report of a run: the time breakdown of each rank, the stragglers, and other events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from thalweg.errors import ranks_text
from thalweg.facts import Cluster
from thalweg.observe.records import EventRecord
from thalweg.observe.step_totals import StepTotals
from thalweg.observe.straggler_episodes import StragglerEpisode, straggler_episodes
from thalweg.observe.timeline import RankTimeline, Timeline, cluster_of


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
    episodes = straggler_episodes(where, run.by_rank, run.member_spans)
    part = run.cut(first, last)
    shown = part.steps
    first_steps = {
        rank: timeline.steps[0].step
        for rank, timeline in run.rank_timelines.items()
        if timeline.steps
    }
    return RunReport(
        timeline=part,
        cluster=where,
        accounts=tuple(
            _account(timeline, first_steps[rank])
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
    means = totals.each()
    return RankBreakdown(
        rank=timeline.rank,
        host=timeline.host,
        rack=timeline.rack,
        steps=totals.steps,
        seconds=means["seconds"],
        computing=means["computing"],
        exposed=means["exposed"],
        hidden=means["hidden"],
        encoding=means["encoding"],
        waiting=means["settled"],
        nbytes=means["nbytes"],
    )


def _happenings(lanes: Iterable[RankTimeline]) -> list[RecordedEvent]:
    """The events in the order of their first record, without stragglers, which have episodes."""
    ranks_of: dict[tuple[int, str, str], list[int]] = {}
    notes: list[tuple[int, EventRecord]] = [
        (timeline.rank, event) for timeline in lanes for event in timeline.notes
    ]
    for rank, event in sorted(notes, key=lambda note: note[1].at):
        if event.topic != "late":
            ranks = ranks_of.setdefault((event.step, event.topic, event.text), [])
            ranks += [] if rank in ranks else [rank]
    return [
        RecordedEvent(step=step, topic=topic, text=text, ranks=tuple(sorted(ranks)))
        for (step, topic, text), ranks in ranks_of.items()
    ]

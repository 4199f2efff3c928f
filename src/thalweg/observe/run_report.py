"""A run in figures: what each rank's time went into, who was late, and what else happened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from thalweg.errors import ranks_text
from thalweg.facts import Cluster
from thalweg.observe.records import Note
from thalweg.observe.step_totals import Tally
from thalweg.observe.straggler_episodes import Episode, episodes
from thalweg.observe.timeline import Lane, Timeline, cluster_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a rank's steps took, in seconds a step. A step is computing, exposed communication and
    waiting between steps; hidden communication and encoding go on meanwhile."""

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
        """Of the time that goes into exposed communication."""
        return self.exposed / self.seconds if self.seconds else 0.0

    @property
    def bits_per_second(self) -> float:
        return 8 * self.nbytes / self.seconds if self.seconds else 0.0

    def entries(self) -> dict[str, Any]:
        entries = asdict(self)
        del entries["nbytes"]
        return {**entries, "share": self.share, "mbps": self.bits_per_second / 1e6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """A note, and the ranks that made it."""

    step: int
    topic: str
    text: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"step {self.step}: {self.topic}: {self.text} ({ranks_text(self.ranks)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """`run` holds the steps that are summed up; `late` may have begun before them."""

    run: Timeline
    cluster: Cluster
    accounts: tuple[Account, ...]
    late: tuple[Episode, ...]
    notes: tuple[Happening, ...]

    @property
    def seconds(self) -> float:
        """A step, on average over ranks."""
        steps = sum(each.steps for each in self.accounts)
        return sum(each.seconds * each.steps for each in self.accounts) / max(1, steps)


def overview(
    run: Timeline,
    *,
    first: int | None = None,
    last: int | None = None,
    cluster: Cluster | None = None,
) -> Overview:
    """Of the steps from `first` to `last`, both included. The whole run is judged, since who is
    late is told by what came before."""
    where = cluster_of(run) if cluster is None else cluster
    for rank in run.lanes:
        where.host(rank)  # or says that there is none
    found = episodes(where, run.by_rank, run.formations)
    part = run.cut(first, last)
    shown = part.steps
    begun = {rank: lane.steps[0].step for rank, lane in run.lanes.items() if lane.steps}
    return Overview(
        run=part,
        cluster=where,
        accounts=tuple(
            _account(lane, begun[rank]) for rank, lane in part.lanes.items() if lane.steps
        ),
        late=tuple(
            each for each in found if shown and each.first <= shown[-1] and each.last >= shown[0]
        ),
        notes=tuple(_happenings(part.lanes.values())),
    )


def _account(lane: Lane, set_up: int) -> Account:
    """Without the step that sets things up, unless there is no other."""
    tally = Tally()
    for step in lane.steps:
        if step.step != set_up or len(lane.steps) == 1:
            tally.add(step)
    each = tally.each()
    return Account(
        rank=lane.rank,
        host=lane.host,
        rack=lane.rack,
        steps=tally.steps,
        seconds=each["seconds"],
        computing=each["computing"],
        exposed=each["exposed"],
        hidden=each["hidden"],
        encoding=each["encoding"],
        waiting=each["settled"],
        nbytes=each["nbytes"],
    )


def _happenings(lanes: Iterable[Lane]) -> list[Happening]:
    """In the order in which they were noted first; who is late is told by episodes."""
    found: dict[tuple[int, str, str], tuple[float, list[int]]] = {}
    notes: list[tuple[int, Note]] = [(lane.rank, note) for lane in lanes for note in lane.notes]
    for rank, note in sorted(notes, key=lambda each: each[1].at):
        if note.topic != "late":
            _, ranks = found.setdefault((note.step, note.topic, note.text), (note.at, []))
            ranks += [] if rank in ranks else [rank]
    return [
        Happening(step=step, topic=topic, text=text, ranks=tuple(sorted(ranks)))
        for (step, topic, text), (_, ranks) in found.items()
    ]

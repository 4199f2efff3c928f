"""Who is late and why, from what all ranks tell of their steps.

Ranks compute, and then wait for one another and for links. How long each computes is told by its
own clock (`computing.py`), how fast links were by its kernel (`links.py`). How long an exchange
took says nothing: it is as long for the early as for the late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple, Self

from thalweg.facts import Cluster, about
from thalweg.observe.records import Flow, Step, by_step
from thalweg.observe.slow_links import Blamed, Links, Owner
from thalweg.observe.slow_ranks import Paces, Slow, Span
from thalweg.observe.straggler import Kind, Late

REMEMBERED = 12  # steps
TWICE, OFTEN = 2, 4  # judgements in a row
PATIENCE = 4  # steps that a rank may be behind, until the others' are judged without it
WORTH_IT, LEAST = 0.05, 0.005  # of a step's time, and seconds: what is less isn't worth a word


class Report(NamedTuple):
    """What a rank tells of a step."""

    step: int
    seconds: float
    computing: float
    exposed: float
    store: float
    flows: tuple[Flow, ...]

    @classmethod
    def of(cls, step: Step) -> Self:
        return cls(step.step, step.seconds, step.computing, step.exposed, step.store, step.flows)

    def entries(self) -> list[Any]:
        *figures, flows = self
        rounded = [round(figure, 5) for figure in figures]
        return [*rounded, [[peer, nbytes, round(busy, 5)] for peer, nbytes, busy in flows]]

    @classmethod
    def read(cls, entries: Sequence[Any]) -> Self:
        step, seconds, computing, exposed, store, flows = entries
        seen = tuple(Flow(*flow) for flow in flows)
        return cls(step, seconds, computing, exposed, store, seen)


class Judge:
    """Of a run of these `members` on this cluster."""

    def __init__(self, cluster: Cluster, members: Sequence[int]) -> None:
        self._cluster = cluster
        self._members = tuple(members)
        self._paces = Paces()
        self._links = Links(cluster)
        self._seen: dict[int, int] = {}  # the last step that each rank told of
        self._open: dict[int, dict[int, Report]] = {}  # steps of which some haven't told
        self._lately: deque[tuple[int, float, float]] = deque(maxlen=REMEMBERED)
        self._changed = False  # since the last judgement
        self._store: dict[int, deque[float]] = {}
        self._before: dict[Any, Late] = {}  # what the last judgement found
        self._times: dict[Any, int] = {}  # how many have found it in a row
        self.late: tuple[Late, ...] = ()

    def form(self, members: Sequence[int]) -> None:
        """Of these members from now on, or under another plan."""
        self._members = tuple(members)
        self._paces.forget()
        self._links.forget()
        self._open.clear()
        self._lately.clear()
        self._store.clear()
        self._before.clear()
        self._times.clear()

    @property
    def newest(self) -> int:
        """The last step that was told of."""
        return max(self._seen.values(), default=0)

    def is_new(self, rank: int, step: int) -> bool:
        return step > self._seen.get(rank, -1)

    def see(self, rank: int, reports: Iterable[Report]) -> None:
        """In the order of steps; those that were seen already are passed over."""
        for report in reports:
            if rank not in self._members or not self.is_new(rank, report.step):
                continue
            self._seen[rank] = report.step
            self._changed = True
            self._paces.add(rank, Span(report.step, report.seconds, report.computing))
            self._open.setdefault(report.step, {})[rank] = report
            if report.store:
                times = self._store.setdefault(rank, deque(maxlen=REMEMBERED // 2))
                times.append(report.store)

    def judge(self) -> tuple[Late, ...]:
        """Who is late now."""
        if not self._changed:
            return self.late
        self._changed = False
        self._close_steps()
        found = {late.key: late for late in self._found()}
        named = {late.key: late for late in self.late}
        self._times = {key: self._times.get(key, 0) + 1 for key in found}
        late = [one for key, one in found.items() if key in named or self._is_sure(one)]
        late += [one for key, one in named.items() if key not in found and key in self._before]
        self._before = found  # who was named is let off when it wasn't found twice
        self.late = tuple(sorted(late, key=lambda each: -each.seconds))
        return self.late

    def _is_sure(self, late: Late) -> bool:
        """It was found several times in a row; if it may be one of several, a few times more, since
        that mostly shows soon."""
        return self._times[late.key] >= (TWICE if len(late.who) == 1 else OFTEN)

    def _found(self) -> Iterator[Late]:
        """By what was seen last."""
        since = {each.key: each.since for each in (*self._before.values(), *self.late)}
        ranks = {late.ranks[0]: late.since for late in self.late if late.kind is Kind.COMPUTE}
        yield from map(self._computes, self._paces.slow(ranks))
        store = {rank: fmean(times) for rank, times in self._store.items()}
        for blamed in self._links.blamed(store):
            late = self._slow_link(blamed)
            if late is not None:
                yield replace(late, since=since.get(late.key, late.since))

    def _close_steps(self) -> None:
        """Steps of which all have told, or that the others have long passed."""
        for step in sorted(self._open):
            reports = self._open[step]
            if len(reports) < len(self._members) and step > self.newest - PATIENCE:
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

    def _computes(self, slow: Slow) -> Late:
        host = self._cluster.host(slow.rank).name
        why = (
            f"rank {slow.rank} on {host} computes {about(slow.computing, 's')}, usual is "
            f"{about(slow.usual, 's')}"
        )
        return Late(
            kind=Kind.COMPUTE,
            who=(str(slow.rank),),
            ranks=(slow.rank,),
            since=slow.since,
            steps=slow.steps,
            seconds=slow.seconds,
            share=slow.share,
            why=why,
        )

    def _slow_link(self, blamed: Blamed) -> Late | None:
        """None if it costs nothing: what is hidden behind computing isn't lost."""
        lately = [figures for figures in self._lately if figures[0] >= blamed.since]
        _, seconds, exposed = (fmean(figures) for figures in zip(*lately, strict=True))
        lost = min(blamed.seconds, exposed)
        if lost < max(WORTH_IT * seconds, LEAST):
            return None
        kinds = {kind for kind, _ in blamed.owners}
        kind = Kind(kinds.pop()) if len(kinds) == 1 else Kind.LINK
        rates = f"gives {_mbit(blamed.gives)}, usual is {_mbit(blamed.usual)}"
        return Late(
            kind=kind,
            who=tuple(sorted(name for _, name in blamed.owners)),
            ranks=self._ranks(blamed.owners),
            since=blamed.since,
            steps=1.0,
            seconds=lost,
            share=min(1.0, lost / seconds),
            why=f"{_owners_text(blamed.owners)} {rates}",
        )

    def _ranks(self, owners: Sequence[Owner]) -> tuple[int, ...]:
        names = {name for _, name in owners}
        hosts = [
            host
            for rack in self._cluster.racks
            for host in rack.hosts
            if host.name in names or rack.name in names
        ]
        return tuple(sorted(rank for host in hosts for rank in host.ranks))


def verdicts(
    cluster: Cluster,
    ranks: Mapping[int, Iterable[Step]],
    formations: Iterable[tuple[int, Sequence[int]]] = (),
) -> Iterator[tuple[int, tuple[Late, ...]]]:
    """Of a run that is over: at each step, who was late. `formations` are from which step on there
    were which members, or another plan."""
    judge = Judge(cluster, sorted(ranks))
    coming = deque(sorted(formations))
    for number, steps in by_step(ranks).items():
        while coming and coming[0][0] <= number:
            judge.form(coming.popleft()[1])
        for rank, step in steps.items():
            judge.see(rank, [Report.of(step)])
        yield number, judge.judge()


def judged(
    cluster: Cluster,
    ranks: Mapping[int, Iterable[Step]],
    formations: Iterable[tuple[int, Sequence[int]]] = (),
) -> list[tuple[int, tuple[Late, ...]]]:
    """Of a run that is over: from which step on who was late, each time that it changed."""
    found: list[tuple[int, tuple[Late, ...]]] = []
    names: set[Any] = set()
    for number, late in verdicts(cluster, ranks, formations):
        if {each.key for each in late} != names:
            names = {each.key for each in late}
            found.append((number, late))
    return found


def _owners_text(owners: Sequence[Owner]) -> str:
    words = {"nic": "the NIC of", "uplink": "the uplink of"}
    return " or ".join(f"{words[kind]} {name}" for kind, name in sorted(owners))


def _mbit(rate: float) -> str:
    return about(rate * 8, "bit/s")

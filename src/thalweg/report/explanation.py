"""What a plan does at one step, worked out: its rounds, checked, in time, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from thalweg.catalog import Catalog, Guarantee
from thalweg.facts import Link, Workload
from thalweg.plan import Plan
from thalweg.rounds import Round, compile_rounds
from thalweg.schedules import Arrow, Group, Traffic, check, timeline, together, traffic

MOST_WORKERS_DRAWN = 256


@dataclass(frozen=True, slots=True)
class Scene:
    """Rounds of different groups that run at the same time, and their moves beat by beat.

    Groups of more than `MOST_WORKERS_DRAWN` are checked and counted, but not put in time.
    """

    rounds: tuple[Round, ...]
    beats: tuple[tuple[Arrow, ...], ...]
    sequential_moves: int | None
    traffic: Traffic

    @property
    def title(self) -> str:
        first = self.rounds[0]
        names = sorted({round_.schedule.name for round_ in self.rounds})
        return f"{first}, by {' and '.join(names)}"

    @property
    def seats(self) -> tuple[tuple[int, ...], ...]:
        """Everybody who takes part, as the cluster has them, rack by rack."""
        ranks = [rank for round_ in self.rounds for rank in round_.group.ranks]
        return Group(tuple(ranks), self.rounds[0].group.cluster).racks


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    plan: Plan
    guarantee: Guarantee
    group: Group
    workload: Workload
    step: int
    scenes: tuple[Scene, ...]
    turns: tuple[tuple[tuple[int, ...], ...], ...]  # who meets at each step of a period, if varying

    @property
    def traffic(self) -> Traffic:
        """Of all rounds together."""
        return together([scene.traffic for scene in self.scenes])

    @property
    def sequential_moves(self) -> int | None:
        numbers = [scene.sequential_moves for scene in self.scenes]
        return None if None in numbers else sum(number or 0 for number in numbers)

    @property
    def data_bytes(self) -> int:
        return self.workload.nbytes

    def slowest_link(self) -> tuple[Link, float] | None:
        """The link that takes longest for its bytes, and how long at its full rate."""
        rates = self.group.cluster.rates()
        seconds = {
            link: rates[link].seconds(nbytes)
            for link, nbytes in self.traffic.links.items()
            if link in rates
        }
        return max(seconds.items(), key=lambda entry: entry[1], default=None)


def explain(
    plan: Plan, group: Group, workload: Workload, step: int, catalog: Catalog
) -> Explanation:
    """Raises ScheduleError if a schedule doesn't keep its promise."""
    compiled = compile_rounds(plan, group, workload, step, catalog)
    payloads = [tuple(rounds_) for _, rounds_ in groupby(compiled, key=_payload)]
    return Explanation(
        plan=plan,
        guarantee=catalog.guarantee(plan),
        group=group,
        workload=workload,
        step=step,
        scenes=tuple(_scene(at_once, group) for at_once in _simultaneous(payloads)),
        turns=_turns(plan, group, catalog),
    )


def _payload(round_: Round) -> tuple[int, str]:
    return round_.bucket, round_.payload.name


def _simultaneous(payloads: Sequence[tuple[Round, ...]]) -> list[tuple[Round, ...]]:
    """The n-th rounds of all groups together: a group's own rounds follow one another."""
    scenes = []
    for of_payload in payloads:
        queues: dict[tuple[int, ...], list[Round]] = {}
        for round_ in of_payload:
            queues.setdefault(round_.group.ranks, []).append(round_)
        for at_once in zip_longest(*queues.values()):
            scenes.append(tuple(round_ for round_ in at_once if round_ is not None))
    return scenes


def _scene(at_once: tuple[Round, ...], group: Group) -> Scene:
    for round_ in at_once:
        check(round_.schedule)
    drawn = all(round_.group.size <= MOST_WORKERS_DRAWN for round_ in at_once)
    in_time = [timeline(round_.schedule) for round_ in at_once] if drawn else []
    merged = [
        tuple(arrow for arrows in beat if arrows for arrow in arrows)
        for beat in zip_longest(*(of_group.beats for of_group in in_time))
    ]
    parts = [traffic(round_.schedule, group.cluster) for round_ in at_once]
    return Scene(
        rounds=at_once,
        beats=tuple(merged),
        sequential_moves=max((of_group.sequential_moves for of_group in in_time), default=None),
        traffic=together(parts),
    )


def _turns(plan: Plan, group: Group, catalog: Catalog) -> tuple[tuple[tuple[int, ...], ...], ...]:
    topology = catalog.topologies[plan.topology.name]
    if topology.groups is None:
        return ()
    steps = range(topology.period(group))
    return tuple(tuple(g.ranks for g in topology.groups(group, step)) for step in steps)

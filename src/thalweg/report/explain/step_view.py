"""One step of a plan: its rounds, checked and put into time slots, with their traffic.

Plans without common rounds have messages to and from one root, at each worker's own speed: there is
no schedule to draw or to check before it runs. The traffic is known all the same: each step of each
worker is one gradient up and one answer down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from thalweg.catalog import Catalog, Guarantee
from thalweg.errors import UsageError
from thalweg.facts import Link, Workload, counted
from thalweg.plan import Plan
from thalweg.redundancy import fastest, is_coded, is_compensated, root_of
from thalweg.report.explain.coded_plan import CodedPlanView, RootTraffic, coded_plan_view
from thalweg.report.explain.groups import Groups, groups_of
from thalweg.schedules import (
    Arrow,
    Group,
    MoveKind,
    Schedule,
    SlotTimeline,
    Traffic,
    check,
    timeline,
    together,
    traffic,
)
from thalweg.steps import Round, Step, compile_step

MAX_DRAWN_WORKERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Rounds of different groups that run at the same time, and their moves by time slot.

    Groups of more than `MAX_DRAWN_WORKERS` are checked and counted, but have no time slots.
    """

    title: str
    bucket: int
    rounds: tuple[Round, ...]
    slots: tuple[tuple[Arrow, ...], ...]
    sequential_moves: int | None

    @property
    def ranks_by_rack(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that take part, rack by rack."""
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
    traffic: Traffic  # of all rounds, or of one step of every worker if there are no rounds
    uncompressed_seconds: float | None  # of the same plan without its compressor
    groups: Groups | None = None  # where replicas differ
    coded: CodedPlanView | None = None
    async_plan: AsyncPlanView | None = None  # instead of scenes

    @property
    def sequential_moves(self) -> int | None:
        numbers = [scene.sequential_moves for scene in self.scenes]
        unknown = None in numbers or self.async_plan is not None
        return None if unknown else sum(number or 0 for number in numbers)

    def slowest_link(self) -> tuple[Link, float] | None:
        """The link that takes longest for its bytes, and how long at its full rate."""
        return _slowest_link(self.traffic, self.group)


def explain(
    plan: Plan,
    group: Group,
    workload: Workload,
    step: int,
    catalog: Catalog,
    batch: int | None = None,
) -> Explanation:
    """Explain one step of a plan; raises ScheduleError if a schedule fails its check. A code
    distributes `batch` samples."""
    view = coded_plan_view(plan, group, batch, catalog) if is_coded(plan, catalog) else None
    if view is None and batch is not None:
        raise UsageError(f"{plan} has no code that distributes samples", "leave --batch out")
    scenes: tuple[Scene, ...] = ()
    messages = slowest = None
    if is_async_plan(plan):
        messages = async_plan_view(plan, group, workload, step, catalog)
    else:
        scenes = _scenes(plan, compile_step(plan, group, workload, step, catalog))
    total = _traffic(plan, group, workload, step, catalog)
    if view is not None and scenes:
        view = replace(view, at_root=_at_root(view, scenes, workload, total))
    if plan.precision is not None:
        plain = replace(plan, precision=None)
        slowest = _slowest_link(_traffic(plain, group, workload, step, catalog), group)
    return Explanation(
        plan=plan,
        guarantee=catalog.guarantee(plan),
        group=group,
        workload=workload,
        step=step,
        scenes=scenes,
        traffic=total,
        uncompressed_seconds=slowest[1] if slowest else None,
        groups=groups_of(plan, group, catalog),
        coded=view,
        async_plan=messages,
    )


def _at_root(
    view: CodedPlanView, scenes: tuple[Scene, ...], workload: Workload, total: Traffic
) -> RootTraffic:
    host = view.allocation.host
    sent = Counter[MoveKind]()
    for schedule in (round_.schedule for scene in scenes for round_ in scene.rounds):
        for move in schedule.moves(host):
            sent[move.kind] += schedule.span_bytes(move)
    return RootTraffic(
        data=workload.nbytes,
        results=sent[MoveKind.SEND],
        answers=sent[MoveKind.ANSWER],
        received=total.received[host],
    )


def members_text(group: Group) -> str:
    """The number of workers and of racks."""
    workers = counted(group.size, "worker")
    return f"{workers} in {len(group.racks)} racks" if len(group.racks) > 1 else workers


def first_step(plan: Plan) -> int:
    """The first step with communication."""
    return 0 if plan.cadence.inside else plan.cadence.every - 1


def _scenes(plan: Plan, compiled: Step) -> tuple[Scene, ...]:
    """The scenes of this step; a schedule that several buckets share is checked only once."""
    timelines: dict[int, SlotTimeline] = {}
    for key, schedule in _distinct(compiled.rounds).items():
        check(schedule)
        if len(schedule.ranks) <= MAX_DRAWN_WORKERS:
            timelines[key] = timeline(schedule)
    scenes = []
    for bucket, rounds in compiled.concurrent:
        names = " and ".join(sorted({round_.schedule.name for round_ in rounds}))
        keys = [id(round_.schedule) for round_ in rounds]
        lines = [timelines[key] for key in keys if key in timelines]
        merged = zip_longest(*(line.slots for line in lines), fillvalue=())
        scene = Scene(
            title=f"bucket {bucket}: {rounds[0].payload.name} of {plan.averaged}, by {names}",
            bucket=bucket,
            rounds=tuple(rounds),
            slots=tuple(tuple(chain.from_iterable(slot)) for slot in merged),
            sequential_moves=max((line.sequential_moves for line in lines), default=None),
        )
        scenes.append(scene)
    return tuple(scenes)


def _distinct(rounds: Iterable[Round]) -> dict[int, Schedule]:
    """The schedules of these rounds by identity: equal buckets share theirs."""
    return {id(round_.schedule): round_.schedule for round_ in rounds}


def _traffic(plan: Plan, group: Group, workload: Workload, step: int, catalog: Catalog) -> Traffic:
    if is_async_plan(plan):
        return _async_traffic(group, async_plan_view(plan, group, workload, step, catalog))
    rounds = compile_step(plan, group, workload, step, catalog).rounds
    nbytes = {key: traffic(each, group.cluster) for key, each in _distinct(rounds).items()}
    return together(nbytes[id(round_.schedule)] for round_ in rounds)


def _slowest_link(link_traffic: Traffic, group: Group) -> tuple[Link, float] | None:
    rates = group.cluster.rates()
    seconds = {
        link: rates[link].seconds(nbytes)
        for link, nbytes in link_traffic.links.items()
        if link in rates
    }
    return max(seconds.items(), key=lambda entry: entry[1], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncPlanView:
    """The messages of a plan without rounds; `story` has a text for the name of each kind."""

    root: int
    up_nbytes: int  # per step of one worker
    down_nbytes: int
    story: dict[str, str]


def is_async_plan(plan: Plan) -> bool:
    return is_compensated(plan) or plan.cadence.staleness is not None


def async_plan_view(
    plan: Plan, group: Group, workload: Workload, step: int, catalog: Catalog
) -> AsyncPlanView:
    root = root_of(plan, group, catalog)
    assert root is not None
    staleness = plan.cadence.staleness
    return AsyncPlanView(
        root=root,
        up_nbytes=_compressed(plan, workload, step, catalog),
        down_nbytes=workload.nbytes,
        story=_compensated(fastest(plan, group.size), group.size, root)
        if staleness is None
        else _asynchronous(staleness, root),
    )


def _compensated(k: int, workers: int, root: int) -> dict[str, str]:
    rest = workers - k
    return {
        "up": f"every worker sends its gradient to rank {root}, with the number of its step",
        "at the root": (
            f"the fastest {k} of {workers} make the step: g, their mean, and c, the correction for "
            "the step before"
        ),
        "down": f"rank {root} sends g + c to all workers, which take the step with it",
        "one step late": (
            f"c = {rest}/{workers} (h - g), h the mean of the {rest} that were too late for the "
            "step before"
        ),
        "dropped": "gradients that are older than one step",
    }


def _asynchronous(staleness: int, root: int) -> dict[str, str]:
    return {
        "push": f"a worker sends its gradient to rank {root} whenever it has one",
        "at the root": "each gradient is a step of its own, taken on arrival",
        "pull": f"rank {root} answers that worker alone, with the parameters at that time",
        "bound": (
            f"a worker more than {staleness} steps ahead of the slowest is answered when that has "
            "caught up"
        ),
    }


def _compressed(plan: Plan, workload: Workload, step: int, catalog: Catalog) -> int:
    if plan.precision is None:
        return workload.nbytes
    compressor = catalog.compressors[plan.precision.name]
    return sum(
        payload.nbytes
        for bucket in workload.buckets(plan.settings.bucket)
        for payload in compressor.payloads(bucket.tensors, step, **plan.precision.arguments)
    )


def _async_traffic(group: Group, view: AsyncPlanView) -> Traffic:
    root, up, down = view.root, view.up_nbytes, view.down_nbytes
    others = [rank for rank in group.ranks if rank != root]
    links = Counter[Link]()
    for rank in others:
        links.update(dict.fromkeys(group.cluster.path(rank, root), up))
        links.update(dict.fromkeys(group.cluster.path(root, rank), down))
    return Traffic(
        sent={root: len(others) * down, **dict.fromkeys(others, up)},
        received={root: len(others) * up, **dict.fromkeys(others, down)},
        messages={root: len(others), **dict.fromkeys(others, 1)},
        links=dict(links),
    )

"""One plan in depth: when each bucket is under way, which links are busy, and what the closed form
says beside the replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

from thalweg.declarations import listed
from thalweg.errors import PlanError
from thalweg.facts import Link, Size
from thalweg.predict.closed_form.exchange import synchronisation_seconds
from thalweg.predict.compiled_step import StepChains
from thalweg.predict.estimate import Estimate
from thalweg.predict.flow_simulator import simulate
from thalweg.predict.predictor import SIMULATED_WARMUP_STEPS, PredictionInput
from thalweg.predict.step_simulator import BucketTimes, SimulatedSteps
from thalweg.predict.straggler_recurrence import loads
from thalweg.redundancy import allocation_of, is_compensated, is_relayed
from thalweg.schedules import together, traffic
from thalweg.steps import Round, compile_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyLink:
    """`share` of its rate that a step's bytes take, over all of the step."""

    link: Link
    nbytes: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedExchange:
    """The largest bucket's exchange with nothing else on the links: what travels, and seconds by
    the flow simulation and by the closed form."""

    what: str
    nbytes: int
    seconds: float
    form: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDetail:
    """`passages` are those of the slowest rank in the last step that was replayed, in seconds since
    that step began; all but the estimate is empty where nothing was replayed."""

    estimate: Estimate
    form: Estimate | None  # the same in closed form, where there is one
    rank: int = 0
    passages: tuple[BucketTimes, ...] = ()
    links: tuple[BusyLink, ...] = ()  # busiest first
    alone: IsolatedExchange | None = None


def plan_detail(setting: PredictionInput) -> PlanDetail:
    """What `predict` says, and what it is made of."""
    estimate, form = setting.estimate(), None
    if setting.group.size > 1:
        with suppress(PlanError):  # of those that wait for a quorum, or for nobody
            form = setting.estimate(by_form=True)
    no_rounds = is_compensated(setting.plan) or setting.plan.cadence.staleness is not None
    if setting.group.size == 1 or setting.is_large or no_rounds:
        return PlanDetail(estimate=estimate, form=form)
    script = StepChains(
        setting.plan, setting.group, setting.workload, setting.machine, setting.catalog
    )
    simulated = setting.simulated(script, _shares(setting))
    rank, passages = _slowest(simulated)
    return PlanDetail(
        estimate=estimate,
        form=form,
        rank=rank,
        passages=passages,
        links=tuple(_busy(setting, script.cycle, estimate.seconds)),
        alone=_alone(setting),
    )


def _shares(setting: PredictionInput) -> dict[int, float] | None:
    if not is_relayed(setting.plan, setting.catalog):
        return None
    allocation = allocation_of(setting.plan, setting.group, setting.catalog)
    return dict(loads(allocation, setting.group.ranks))


def _slowest(simulated: SimulatedSteps) -> tuple[int, tuple[BucketTimes, ...]]:
    """Whose last step was longest, and its buckets in it."""

    def began(rank: int) -> float:
        ended = simulated.marks[rank].ended
        return ended[-2] if len(ended) > 1 else 0.0

    rank = max(simulated.marks, key=lambda r: simulated.marks[r].ended[-1] - began(r))
    marks, since = simulated.marks[rank], began(rank)
    last = len(marks.ended) - 1
    return rank, tuple(
        BucketTimes(
            last - SIMULATED_WARMUP_STEPS,
            one.handed_in - since,
            one.began - since,
            max(0.0, one.ended - since),
        )
        for one in marks.passages
        if one.step == last
    )


def _busy(setting: PredictionInput, cycle: int, seconds: float) -> list[BusyLink]:
    """Of a step, the mean over the steps of a period, or over as many as tell."""
    steps = min(cycle, 16)
    total: Counter[Link] = Counter()
    for step in range(steps):
        total.update(_traffic(setting, _rounds(setting, step)))
    rates = setting.cluster.rates()
    found = [
        BusyLink(
            link=link,
            nbytes=nbytes / steps,
            share=rates[link].seconds(nbytes / steps) / seconds if seconds else 0.0,
        )
        for link, nbytes in total.items()
        if link in rates
    ]
    return sorted(found, key=lambda busy: (-busy.share, str(busy.link)))


def _rounds(setting: PredictionInput, step: int) -> Sequence[Round]:
    return compile_rounds(setting.plan, setting.group, setting.workload, step, setting.catalog)


def _traffic(setting: PredictionInput, rounds: Iterable[Round]) -> dict[Link, int]:
    return dict(together(traffic(one.schedule, setting.cluster) for one in rounds).links)


def _alone(setting: PredictionInput) -> IsolatedExchange | None:
    """At the first step at which all meet."""
    bucket = max(setting.workload.buckets(setting.plan.settings.bucket), key=lambda one: one.nbytes)
    workload = replace(setting.workload, tensors=tuple(reversed(bucket.tensors)))
    limit = Size(workload.nbytes + 1)
    plan = replace(setting.plan, settings=replace(setting.plan.settings, bucket=limit))
    step = setting.plan.cadence.every - 1
    rounds = compile_rounds(plan, setting.group, workload, step, setting.catalog)
    if not rounds:
        return None
    seconds, names = 0.0, list[str]()
    for _, numbered in groupby(rounds, key=lambda one: one.number):
        at_once = list(numbered)
        names.append(at_once[0].schedule.name)
        seconds += max(
            max(simulate(one.schedule, setting.cluster, setting.transport_costs).values())
            for one in at_once
        )
    form = synchronisation_seconds(plan, setting.group, workload, setting.catalog)
    return IsolatedExchange(
        what=listed(dict.fromkeys(names)), nbytes=workload.nbytes, seconds=seconds, form=form
    )

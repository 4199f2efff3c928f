"""The details of one plan's prediction: bucket times, busy links, and the closed form beside the
simulation."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from thalweg.catalog import default_catalog
from thalweg.declarations import listed
from thalweg.errors import PlanError
from thalweg.facts import Link, Situation, Size
from thalweg.plan import Plan
from thalweg.predict.closed_form import synchronisation_seconds
from thalweg.predict.estimate import Estimate
from thalweg.predict.flow_simulator import simulate
from thalweg.predict.mixing import link_bytes
from thalweg.predict.predictor import MAX_SIMULATED_STEPS, PredictionInput
from thalweg.predict.step_simulator import SIMULATED_WARMUP_STEPS, BucketTimes, RankTimes
from thalweg.predict.straggler_recurrence import loads
from thalweg.redundancy import allocation_of, is_compensated, is_relayed
from thalweg.steps import compile_step


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyLink:
    """A link, its bytes per step, and its utilization over the step (`share`)."""

    link: Link
    nbytes: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedExchange:
    """The largest bucket's exchange on idle links: its schedules, and its seconds by the flow
    simulation and by the closed form."""

    what: str
    nbytes: int
    seconds: float
    form: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDetail:
    """The estimate of a plan, and the `passages` of the slowest rank in the last simulated step, in
    seconds since that step began. All but the estimates is empty if nothing was simulated."""

    estimate: Estimate
    form: Estimate | None  # the same in closed form, where there is one
    rank: int = 0
    passages: tuple[BucketTimes, ...] = ()
    links: tuple[BusyLink, ...] = ()  # busiest first
    alone: IsolatedExchange | None = None


def plan_detail(plan: Plan | str, situation: Situation) -> PlanDetail:
    """The estimate of `predict` with its details."""
    given = PredictionInput(plan, situation)
    estimate, form, shares = given.estimate(), None, None
    if given.group.size > 1:
        with suppress(PlanError):  # of plans that wait for a quorum, or for nobody
            form = given.estimate(by_form=True)
    no_rounds = is_compensated(given.plan) or given.plan.cadence.staleness is not None
    if given.group.size == 1 or given.is_large or no_rounds:
        return PlanDetail(estimate=estimate, form=form)
    if is_relayed(given.plan):
        shares = loads(allocation_of(given.plan, given.group), given.group.ranks)
    chains = given.chains()
    rank, passages = _slowest(given.simulated(chains, shares))
    return PlanDetail(
        estimate=estimate,
        form=form,
        rank=rank,
        passages=passages,
        links=tuple(_busy(given, chains.cycle, estimate.seconds)),
        alone=_alone(given),
    )


def _slowest(simulated: Mapping[int, RankTimes]) -> tuple[int, tuple[BucketTimes, ...]]:
    """The rank whose last step was longest, and the times of its buckets."""

    def last_step(rank: int) -> float:
        ended = simulated[rank].ended
        return ended[-1] - ended[-2]

    rank = max(simulated, key=last_step)
    marks = simulated[rank]
    last, since = len(marks.ended) - 1, marks.ended[-2]
    step = last - SIMULATED_WARMUP_STEPS
    return rank, tuple(
        BucketTimes(
            step, passage.handed_in - since, passage.began - since, max(0.0, passage.ended - since)
        )
        for passage in marks.passages
        if passage.step == last
    )


def _busy(given: PredictionInput, cycle: int, seconds: float) -> list[BusyLink]:
    """The links by utilization, averaged over the steps of a period or its first steps."""
    steps, catalog = min(cycle, MAX_SIMULATED_STEPS), default_catalog()
    sent = link_bytes(given.plan, given.group, given.workload, steps, catalog, given.cluster)
    per_step = {link: nbytes / steps for link, nbytes in sent.items()}
    found = [
        BusyLink(link=link, nbytes=per_step[link], share=busy / seconds if seconds else 0.0)
        for link, busy in given.cluster.busy_seconds(per_step).items()
    ]
    return sorted(found, key=lambda busy: (-busy.share, str(busy.link)))


def _alone(given: PredictionInput) -> IsolatedExchange | None:
    """The exchange at the first step at which all ranks synchronise."""
    bucket = max(
        given.workload.buckets(given.plan.settings.bucket), key=lambda bucket: bucket.nbytes
    )
    workload = replace(given.workload, tensors=tuple(reversed(bucket.tensors)))
    limit = Size(workload.nbytes + 1)
    plan = replace(given.plan, settings=replace(given.plan.settings, bucket=limit))
    compiled = compile_step(plan, given.group, workload, given.plan.cadence.every - 1)
    if not compiled.chains:
        return None
    seconds, names = 0.0, list[str]()
    for _, concurrent in compiled.concurrent:
        names.append(concurrent[0].schedule.name)
        seconds += max(
            max(simulate(round_.schedule, given.cluster, given.transport_costs).values())
            for round_ in concurrent
        )
    form = synchronisation_seconds(plan, given.group, workload)
    return IsolatedExchange(
        what=listed(dict.fromkeys(names)), nbytes=workload.nbytes, seconds=seconds, form=form
    )

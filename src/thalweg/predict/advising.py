"""`advise()`: all sound plans of the classes that are allowed, predicted and put in order.

What a step takes is predicted; how many more steps a lossy or eventual plan needs is assumed, and
plans are ranked by the product. The best plans of gradients are also tried in smaller buckets,
which overlap more with backward and cost more messages. On more than a few workers only plans that
are good by their closed forms are replayed; `Estimate.form` says which were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import exp, log

from thalweg.catalog import Catalog, default_catalog
from thalweg.declarations import Promise
from thalweg.errors import PlanError
from thalweg.facts import Cluster, Machine, Workload, about
from thalweg.plan import Plan
from thalweg.predict.advice import Advice, Advised, Break, Sweep
from thalweg.predict.candidates import BASELINE, candidates, with_buckets
from thalweg.predict.estimate import Estimate
from thalweg.predict.prediction import predict
from thalweg.predict.what_if import scaled, slowest_nic
from thalweg.schedules import Group

EXTRA_STEPS = {Promise.EXACT: 0.0, Promise.LOSSY: 0.03, Promise.EVENTUAL: 0.03}
IN_BUCKETS = 4  # of the best plans are tried in smaller ones
ALL_REPLAYED = 8  # workers up to which every plan is
REPLAYED = 10  # of the others the best by their closed forms are
WORTH_IT = 1.05  # speed-up below which plain DDP is the right answer
SWEPT = 5  # plans whose time is drawn against the links' rate
FACTORS = tuple(2.0**power for power in range(-4, 6))
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    pass


def advise(
    cluster: Cluster,
    workload: Workload,
    machine: Machine | None = None,
    *,
    allow: Promise = Promise.EXACT,
    extra_steps: Mapping[Promise, float] | None = None,
    declared: Cluster | None = None,
    has_data: bool = True,
    sweep: bool = False,
    catalog: Catalog | None = None,
    progress: Progress = silent,
) -> Advice:
    """Plans in order, best first.

    allow        the weakest promise that is acceptable
    extra_steps  how many more steps, relative to exact plans, those of each class are assumed to
                 need for the same result
    declared     as in `predict`
    has_data     whether attach() is given the data, which codes need
    sweep        also reckon the best plans' time for slower and faster links
    """
    catalog = catalog or default_catalog()
    machine = machine or Machine(assumed=("messages cost nothing",))
    extra = {**EXTRA_STEPS, **(extra_steps or {})}
    found = candidates(Group.everybody(declared or cluster), allow, catalog, has_data=has_data)
    left_out = dict(found.left_out)

    def estimated(plan: Plan, by_form: bool = False) -> Estimate | None:
        try:
            return predict(
                plan,
                cluster,
                workload,
                machine,
                declared=declared,
                catalog=catalog,
                by_form=by_form,
            )
        except PlanError as error:
            if by_form:
                return None
            left_out[str(plan)] = error.problem
            return None

    def cost(plan: Plan, estimate: Estimate) -> float:
        return estimate.seconds * (1 + extra[catalog.guarantee(plan).promise])

    estimates: list[tuple[Plan, Estimate]] = []
    rough = {}
    if cluster.workers > ALL_REPLAYED:
        forms = {plan: estimated(plan, by_form=True) for plan in found.plans}
        rough = _not_among_the_best(forms, cost)
    for number, plan in enumerate(found.plans):
        progress(number, len(found.plans))
        if (estimate := rough.get(plan) or estimated(plan)) is not None:
            estimates.append((plan, estimate))
    estimates.sort(key=lambda one: cost(*one))
    baseline = next(one for one in estimates if str(one[0]) == BASELINE)
    for plan, _ in [*estimates[:IN_BUCKETS], baseline]:
        for smaller in with_buckets(plan, workload, catalog):
            if (estimate := estimated(smaller)) is not None:
                estimates.append((smaller, estimate))
    estimates = _best_buckets(estimates, cost)
    estimates.sort(key=lambda one: cost(*one))
    ddp = next(estimate for plan, estimate in estimates if str(plan) == BASELINE)
    ranking = tuple(_advised(plan, estimate, ddp, extra, catalog) for plan, estimate in estimates)
    return Advice(
        cluster=cluster,
        workload=workload,
        machine=machine,
        allow=allow,
        ranking=ranking,
        verdict=_verdict(ranking),
        assumed=tuple(
            dict.fromkeys(
                [
                    *(text for one in ranking for text in one.estimate.assumed),
                    *_assumed_steps(ranking, extra),
                ]
            )
        ),
        left_out=left_out,
        sweep=_sweep(ranking, cluster, workload, machine, catalog) if sweep else None,
    )


def _not_among_the_best(
    forms: Mapping[Plan, Estimate | None], cost: Callable[[Plan, Estimate], float]
) -> dict[Plan, Estimate]:
    """Plans whose closed form has to do: all but the first ones by it, and `ddp`, which all are
    compared with."""
    known = [(plan, form) for plan, form in forms.items() if form is not None]
    others = [one for one in known if one[0].text.preset.name != BASELINE]
    return dict(sorted(others, key=lambda one: cost(*one))[REPLAYED:])


def _best_buckets(
    estimates: Iterable[tuple[Plan, Estimate]], cost: Callable[[Plan, Estimate], float]
) -> list[tuple[Plan, Estimate]]:
    """Of a plan in several bucket sizes the best; the default where nothing is gained. `ddp` as it
    comes stays, beside its best."""
    best: dict[str, tuple[Plan, Estimate]] = {}
    for plan, estimate in estimates:
        name = str(plan).partition(" @")[0]
        if name == BASELINE and str(plan) != BASELINE:
            name = f"{BASELINE} in other buckets"
        if name not in best or cost(plan, estimate) < 0.99 * cost(*best[name]):
            best[name] = plan, estimate
    return list(best.values())


def _advised(
    plan: Plan,
    estimate: Estimate,
    ddp: Estimate,
    extra: Mapping[Promise, float],
    catalog: Catalog,
) -> Advised:
    guarantee = catalog.guarantee(plan)
    return Advised(
        plan=plan,
        estimate=estimate,
        vs_ddp=ddp.seconds / estimate.seconds if estimate.seconds else 1.0,
        promise=guarantee.promise,
        steps=1 + extra[guarantee.promise],
        survives=f"late: {guarantee.late}; dead: {guarantee.dead}",
        why=_why(estimate, ddp),
    )


def _why(estimate: Estimate, ddp: Estimate) -> str:
    """What of a step differs most from ddp's, and what that costs."""
    if estimate.sync == BASELINE:
        return f"what torch does: {_mostly(estimate)}"
    own, other = estimate.parts, ddp.parts
    gains = {
        "transfers that nothing hides": other.transfer - own.transfer,
        "waiting for late workers": other.waiting - own.waiting,
    }
    costs = {
        "computing": own.compute - other.compute,
        "encoding and decoding": own.encode + own.decode - other.encode - other.decode,
        "transfers": own.transfer - other.transfer,
        "waiting": own.waiting - other.waiting,
    }
    noticed = 0.02 * ddp.seconds
    gained = [f"{about(s, 's')} less of {what}" for what, s in gains.items() if s > noticed]
    lost = [f"{about(s, 's')} more of {what}" for what, s in costs.items() if s > noticed]
    said = " and ".join(gained) + (", for " if gained and lost else "") + " and ".join(lost)
    return said or f"as ddp: {_mostly(estimate)}"


def _mostly(estimate: Estimate) -> str:
    parts = estimate.parts
    shares = {
        "computing": parts.compute,
        "encoding and decoding": parts.encode + parts.decode,
        "transfers that nothing hides": parts.transfer,
        "waiting for late workers": parts.waiting,
    }
    what = max(shares, key=shares.__getitem__)
    whole = estimate.seconds or 1.0
    return f"{shares[what] / whole:.0%} of a step is {what}"


def _verdict(ranking: Sequence[Advised]) -> str:
    best = ranking[0]
    if best.vs_ddp / best.steps < WORTH_IT:
        return "Plain DDP is the right answer here: nothing that is allowed gains 5 % on it."
    estimate = best.estimate
    return (
        f"Use {best.plan}: {about(estimate.seconds, 's')} a step "
        f"({about(estimate.low, 's')} to {about(estimate.high, 's')}), "
        f"{best.vs_ddp:.2f}x ddp's speed step by step."
    )


def _assumed_steps(ranking: Sequence[Advised], extra: Mapping[Promise, float]) -> list[str]:
    classes = {advised.promise for advised in ranking} - {Promise.EXACT}
    return [
        f"{promise.value} plans need {extra[promise]:.0%} more steps than exact ones"
        for promise in Promise
        if promise in classes
    ]


def _sweep(
    ranking: Sequence[Advised],
    cluster: Cluster,
    workload: Workload,
    machine: Machine,
    catalog: Catalog,
) -> Sweep:
    ddp = next(one for one in ranking if str(one.plan) == BASELINE)
    plans = list(dict.fromkeys([*(one.plan for one in ranking[:SWEPT]), ddp.plan]))
    seconds = {
        str(plan): tuple(
            predict(plan, scaled(cluster, factor), workload, machine, catalog=catalog).seconds
            for factor in FACTORS
        )
        for plan in plans
    }
    rates = tuple(slowest_nic(cluster) * factor for factor in FACTORS)
    return Sweep(rates=rates, seconds=seconds, breaks=tuple(breaks(rates, seconds)))


def breaks(rates: Sequence[float], seconds: Mapping[str, Sequence[float]]) -> list[Break]:
    """Where the fastest plan changes, between two rates on a straight line of logarithms."""
    found = []
    for (low, high), (first, second) in zip(
        pairwise(rates), pairwise(range(len(rates))), strict=True
    ):
        here = min(seconds, key=lambda sync: seconds[sync][first])
        there = min(seconds, key=lambda sync: seconds[sync][second])
        if here == there:
            continue
        gap = log(seconds[there][first] / seconds[here][first])
        end = log(seconds[there][second] / seconds[here][second])
        way = gap / (gap - end) if gap != end else 0.5
        rate = exp(log(low) + way * log(high / low))
        found.append(Break(slower_links=here, faster_links=there, bits_per_second=rate))
    return found

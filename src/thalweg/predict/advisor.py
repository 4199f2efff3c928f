"""`advise()`: all sound plans of the classes that are allowed, predicted and put in order.

What a step takes is predicted; how many more steps a lossy or eventual plan needs was measured
(`extra_steps.py`), and plans are ranked by the product. Those of which that isn't known come last.
The best plans of gradients are also tried in smaller buckets, which overlap more with backward and
cost more messages. On more than a few workers only plans that are good by their closed forms are
replayed; `Estimate.form` says which were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, log

from thalweg.catalog import Catalog, default_catalog
from thalweg.declarations import Promise
from thalweg.errors import PlanError
from thalweg.facts import Cluster, Machine, Workload, about
from thalweg.plan import Plan
from thalweg.predict.candidates import (
    Candidates,
    as_strong_as,
    candidates,
    with_buckets,
)
from thalweg.predict.estimate import Advice, Crossover, Estimate, RankedPlan, Sweep
from thalweg.predict.extra_steps import ASSUMED_OPTIMIZER, ExtraSteps
from thalweg.predict.predictor import predict
from thalweg.predict.what_if import scaled, slowest_nic
from thalweg.presets import BASELINE_PLAN
from thalweg.schedules import Group

REBUCKETED_PLAN_COUNT = 4  # of the best plans are tried in smaller ones
MAX_WORKERS_ALL_SIMULATED = 8  # workers up to which every plan is
SIMULATED_PLAN_COUNT = 10  # of the others the best by their closed forms are
MIN_ADVISED_SPEEDUP = 1.05  # speed-up below which plain DDP is the right answer
SWEPT_PLAN_COUNT = 5  # plans whose time is drawn against the links' rate
SWEPT_RATE_FACTORS = tuple(2.0**power for power in range(-4, 6))
Progress = Callable[[int, int], None]
_Estimated = tuple[Plan, Estimate]


def no_progress(done: int, total: int) -> None:
    pass


def advise(
    cluster: Cluster,
    workload: Workload,
    machine: Machine | None = None,
    *,
    allow: Promise = Promise.EXACT,
    optimizer: str | None = None,
    extra_steps: Mapping[Promise, float] | None = None,
    declared: Cluster | None = None,
    has_data: bool = True,
    refuse: Callable[[Plan], None] = lambda plan: None,
    sweep: bool = False,
    catalog: Catalog | None = None,
    progress: Progress = no_progress,
) -> Advice:
    """Plans in order, best first.

    allow        the weakest promise that is acceptable
    optimizer    what trains the model, like "sgd" or "adamw"; by default what is usual for it
    extra_steps  how many more steps, relative to exact plans, those of each class need for the same
                 result; by default what was measured with the optimizer
    declared     as in `predict`
    has_data     whether attach() is given the data, which codes need
    refuse       raises PlanError for plans that can't be run for other reasons
    sweep        also reckon the best plans' time for slower and faster links
    """
    used = optimizer or workload.trained_with or ASSUMED_OPTIMIZER
    advisor = _Advisor(
        cluster=cluster,
        workload=workload,
        machine=machine or Machine(assumed=("messages cost nothing",)),
        declared=declared,
        has_data=has_data,
        refuse=refuse,
        extra=ExtraSteps(optimizer=used.lower(), given=extra_steps or {}),
        catalog=catalog or default_catalog(),
        progress=progress,
    )
    found = advisor.candidates(allow)
    estimates = advisor.ranked(found.plans)
    ddp = next((estimate for plan, estimate in estimates if str(plan) == BASELINE_PLAN), None)
    ddp = ddp or advisor.predicted(advisor.catalog.plan(BASELINE_PLAN))  # if that one can't be run
    ranking = tuple(advisor.ranked_plan(one, ddp) for one in estimates)
    left_out = {**found.left_out, **advisor.left_out}
    weaker = advisor.next_class(allow, ddp) if ranking[0].gain < MIN_ADVISED_SPEEDUP else None
    priced = [*ranking, *([weaker] if weaker else [])]
    assumed = [
        *(text for ranked in ranking for text in ranked.estimate.assumed),
        *_assumed_steps(priced, advisor.extra, optimizer),
    ]
    return Advice(
        cluster=cluster,
        workload=workload,
        machine=advisor.machine,
        allow=allow,
        optimizer=advisor.extra.optimizer,
        ranking=ranking,
        verdict=_verdict(ranking),
        next_class=weaker,
        assumed=tuple(dict.fromkeys(assumed)),
        left_out=left_out,
        sweep=_sweep(ranking, advisor) if sweep else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Advisor:
    """The arguments of `advise`, and why plans couldn't be predicted."""

    cluster: Cluster
    workload: Workload
    machine: Machine
    declared: Cluster | None
    has_data: bool
    refuse: Callable[[Plan], None]
    extra: ExtraSteps
    catalog: Catalog
    progress: Progress
    left_out: dict[str, str] = field(default_factory=dict)

    def candidates(self, allow: Promise) -> Candidates:
        group = Group.everybody(self.declared or self.cluster)
        return candidates(group, allow, self.catalog, has_data=self.has_data, refuse=self.refuse)

    def predicted(self, plan: Plan, *, by_form: bool = False) -> Estimate:
        return predict(
            plan,
            self.cluster,
            self.workload,
            self.machine,
            declared=self.declared,
            catalog=self.catalog,
            by_form=by_form,
        )

    def ranked(self, plans: Sequence[Plan]) -> list[_Estimated]:
        estimates: list[_Estimated] = []
        rough = (
            self._not_among_the_best(plans)
            if self.cluster.workers > MAX_WORKERS_ALL_SIMULATED
            else {}
        )
        for number, plan in enumerate(plans):
            self.progress(number, len(plans))
            if (estimate := rough.get(plan) or self._estimated(plan)) is not None:
                estimates.append((plan, estimate))
        estimates.sort(key=self._order)
        baseline = [
            one for one in estimates[REBUCKETED_PLAN_COUNT:] if str(one[0]) == BASELINE_PLAN
        ]
        for plan, _ in [*estimates[:REBUCKETED_PLAN_COUNT], *baseline]:
            for smaller in with_buckets(plan, self.workload, self.catalog):
                if (estimate := self._estimated(smaller)) is not None:
                    estimates.append((smaller, estimate))
        return sorted(_best_buckets(estimates), key=self._order)

    def next_class(self, allow: Promise, ddp: Estimate) -> RankedPlan | None:
        """The best plan of the strongest class that isn't allowed and has one that is worth it."""
        for promise in list(Promise)[len(as_strong_as(allow)) :]:
            plans = [
                plan
                for plan in self.candidates(promise).plans
                if self._promise(plan) is promise and self._is_reliable(plan)
            ]
            for best in self.ranked(plans)[:1]:
                found = self.ranked_plan(best, ddp)
                if found.gain >= MIN_ADVISED_SPEEDUP:
                    return found
        return None

    def ranked_plan(self, one: _Estimated, ddp: Estimate) -> RankedPlan:
        plan, estimate = one
        guarantee, reliable = self.catalog.guarantee(plan), self._is_reliable(plan)
        more = self.extra.of(plan, guarantee.promise)
        why = _why(estimate, ddp)
        if more is None:
            why += f"; extra steps not measured under {self.extra.optimizer}"
        elif guarantee.promise is not Promise.EXACT:
            why += f"; {more:.0%} more steps" + (
                "" if reliable else " in a short run, and more in a long one"
            )
        return RankedPlan(
            plan=plan,
            estimate=estimate,
            vs_ddp=ddp.seconds / estimate.seconds if estimate.seconds else 1.0,
            promise=guarantee.promise,
            steps=None if more is None else 1 + more,
            reliable=reliable,
            survives=f"late: {guarantee.late}; dead: {guarantee.dead}",
            why=why,
        )

    def _promise(self, plan: Plan) -> Promise:
        return self.catalog.guarantee(plan).promise

    def _is_reliable(self, plan: Plan) -> bool:
        promise = self._promise(plan)
        return self.extra.is_reliable(promise, self.extra.of(plan, promise))

    def _order(self, one: _Estimated) -> tuple[int, bool, float]:
        """By cost; plans whose steps can't be relied on come last, class by class, and of those
        the ones that weren't measured."""
        plan, estimate = one
        promise = self._promise(plan)
        more = self.extra.of(plan, promise)
        last = 0 if self._is_reliable(plan) else len(as_strong_as(promise))
        return last, more is None, estimate.seconds * (1 + (more or 0.0))

    def _estimated(self, plan: Plan) -> Estimate | None:
        try:
            return self.predicted(plan)
        except PlanError as error:
            self.left_out[str(plan)] = error.problem
            return None

    def _not_among_the_best(self, plans: Sequence[Plan]) -> dict[Plan, Estimate]:
        """Plans whose closed form has to do: all but the first ones by it, and `ddp`, which all are
        compared with."""
        known = []
        for plan in plans:
            if plan.text.preset.name != BASELINE_PLAN:
                with suppress(PlanError):
                    known.append((plan, self.predicted(plan, by_form=True)))
        return dict(sorted(known, key=self._order)[SIMULATED_PLAN_COUNT:])


def _best_buckets(estimates: Iterable[_Estimated]) -> list[_Estimated]:
    """Of a plan in several bucket sizes the best; the default where nothing is gained. `ddp` as it
    comes stays, beside its best."""
    best: dict[str, _Estimated] = {}
    for plan, estimate in estimates:
        name = str(plan).partition(" @")[0]
        if name == BASELINE_PLAN and str(plan) != BASELINE_PLAN:
            name = f"{BASELINE_PLAN} in other buckets"
        if name not in best or estimate.seconds < 0.99 * best[name][1].seconds:
            best[name] = plan, estimate
    return list(best.values())


def _why(estimate: Estimate, ddp: Estimate) -> str:
    """What of a step differs most from ddp's, and what that costs."""
    if estimate.sync == BASELINE_PLAN:
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


def _verdict(ranking: Sequence[RankedPlan]) -> str:
    best = ranking[0]
    if best.gain < MIN_ADVISED_SPEEDUP:
        return "Plain DDP is the right answer here: nothing that is allowed gains 5 % on it."
    estimate = best.estimate
    whole = f", {best.gain:.2f}x with its extra steps" if best.gain != best.vs_ddp else ""
    return (
        f"Use {best.plan}: {about(estimate.seconds, 's')} a step "
        f"({about(estimate.low, 's')} to {about(estimate.high, 's')}), "
        f"{best.vs_ddp:.2f}x ddp's speed step by step{whole}."
    )


def _assumed_steps(
    ranking: Sequence[RankedPlan], extra: ExtraSteps, optimizer: str | None
) -> Iterator[str]:
    """What the extra steps of these plans rest on; nothing if none has any."""
    classes = {ranked.promise for ranked in ranking} - {Promise.EXACT}
    for promise in Promise:
        if promise in classes and promise in extra.given:
            share = f"{extra.given[promise]:.0%}"
            yield f"{promise.value} plans need {share} more steps than exact ones"
    if classes - {*extra.given}:
        if optimizer is None:
            yield f"the optimizer is {extra.optimizer}"
        if extra.source:
            yield extra.source


def _sweep(ranking: Sequence[RankedPlan], advisor: _Advisor) -> Sweep:
    ddp = next(ranked for ranked in ranking if str(ranked.plan) == BASELINE_PLAN)
    plans = list(dict.fromkeys([*(ranked.plan for ranked in ranking[:SWEPT_PLAN_COUNT]), ddp.plan]))
    others = [
        replace(advisor, cluster=scaled(advisor.cluster, factor)) for factor in SWEPT_RATE_FACTORS
    ]
    seconds = {
        str(plan): tuple(other.predicted(plan).seconds for other in others) for plan in plans
    }
    rates = tuple(slowest_nic(advisor.cluster) * factor for factor in SWEPT_RATE_FACTORS)
    return Sweep(rates=rates, seconds=seconds, breaks=tuple(crossovers(rates, seconds)))


def crossovers(rates: Sequence[float], seconds: Mapping[str, Sequence[float]]) -> list[Crossover]:
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
        found.append(Crossover(slower_links=here, faster_links=there, bits_per_second=rate))
    return found

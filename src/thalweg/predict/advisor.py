"""`advise()`: the ranking of all sound plans of the allowed classes by their predicted time.

The step time is predicted; the extra steps of a lossy or eventual plan were measured, and plans are
ranked by the product. Plans with unknown extra steps come last. The best gradient plans are also
tried with smaller buckets, which overlap more with backward and cost more messages. On more than a
few workers only the best plans by their closed forms are simulated; `Estimate.form` says which.

*Extra steps* for the same loss as an exact plan depend on the optimizer. `extra_steps.toml` has the
measurements of `scripts/measure-extra-steps`; for other plans and optimizers nothing is assumed. A
compressor's value was measured on a ring and holds for every topology; other plans are looked up as
written. A small fraction was the same at every target loss; a large one grew with the target, so
its value in a long run is unknown.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from itertools import pairwise
from math import exp, log
from typing import Any

from thalweg.catalog import default_catalog
from thalweg.declarations import Promise, listed, nearest
from thalweg.errors import PlanError, UsageError
from thalweg.facts import Situation, about, scaled, slowest_nic
from thalweg.plan import Cadence, Plan
from thalweg.predict.candidates import (
    as_strong_as,
    candidates,
    with_smaller_buckets,
)
from thalweg.predict.estimate import Advice, Crossover, Estimate, RankedPlan, Sweep
from thalweg.predict.predictor import predict
from thalweg.presets import BASELINE_PLAN
from thalweg.schedules import Group

# adam and adamw differ in weight decay only.
MEASURED_OPTIMIZERS = {"sgd": "sgd", "adam": "adamw", "adamw": "adamw"}
UNMEASURED_OPTIMIZERS = (
    *("adafactor", "adagrad", "lamb", "lars", "lion", "muon", "nadam", "radam", "rmsprop"),
)
MAX_TRUSTED_EXTRA_FRACTION = 0.25  # a larger fraction isn't reliable in a long run
ASSUMED_OPTIMIZER = "adamw"  # trains most models, and needs more extra steps
REBUCKETED_PLAN_COUNT = 4  # best plans that are tried with smaller buckets
MAX_WORKERS_ALL_SIMULATED = 8  # workers up to which every plan is simulated
SIMULATED_PLAN_COUNT = 10  # plans simulated on more workers, the best by their closed forms
MIN_ADVISED_SPEEDUP = 1.05  # below this speed-up, DDP is advised
SWEPT_PLAN_COUNT = 5  # plans whose time is drawn over the links' rate
SWEPT_RATE_FACTORS = tuple(2.0**power for power in range(-4, 6))
Progress = Callable[[int, int], None]


def optimizer_named(text: str) -> str:
    """The optimizer's name as in the tables; UsageError if it is unknown."""
    name, known = text.strip().lower(), (*MEASURED_OPTIMIZERS, *UNMEASURED_OPTIMIZERS)
    if name not in known:
        raise UsageError(
            f"there is no optimizer {text!r}", f"there are {listed(known)}" + nearest(name, known)
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraSteps:
    """The extra steps under one optimizer, or the fraction `given` for a class of plans."""

    optimizer: str
    given: Mapping[Promise, float] = field(default_factory=dict)

    def of(self, plan: Plan, promise: Promise) -> float | None:
        """The extra steps as a fraction of an exact plan's steps; None if not measured."""
        if promise in self.given or promise is Promise.EXACT:
            return self.given.get(promise, 0.0)
        text = str(replace(plan.text, settings=()))
        if not plan.averages_parameters and plan.redundancy is None and plan.cadence == Cadence():
            text = f"ring+{plan.text.compressor}"
        median, *_ = self._table.get(text, (None,))
        return None if median is None else max(0.0, round(median, 2))

    def is_reliable(self, promise: Promise, share: float | None) -> bool:
        """True if that fraction holds in a long run too, as given ones do."""
        return share is not None and (promise in self.given or share <= MAX_TRUSTED_EXTRA_FRACTION)

    @property
    def source(self) -> str:
        """The source of the measurements in words; empty if this optimizer has none."""
        if not self._table:
            return ""
        name = MEASURED_OPTIMIZERS[self.optimizer]
        return f"extra steps as measured with {name} on {self._table['job']}"

    @property
    def _table(self) -> Mapping[str, Any]:
        return _tables().get(MEASURED_OPTIMIZERS.get(self.optimizer, ""), {})


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    table = files("thalweg.predict").joinpath("extra_steps.toml")
    return tomllib.loads(table.read_text(encoding="utf-8"))


def advise(
    situation: Situation,
    *,
    allow: Promise = Promise.EXACT,
    optimizer: str | None = None,
    extra_steps: Mapping[Promise, float] | None = None,
    has_data: bool = True,
    refuse: Callable[[Plan], None] = lambda plan: None,
    sweep: bool = False,
    progress: Progress = lambda done, total: None,
) -> Advice:
    """The ranking of all candidate plans, best first.

    allow        the weakest promise that is acceptable
    optimizer    the name of the optimizer, like "sgd" or "adamw"; by default the workload's
    extra_steps  the fraction of extra steps, relative to exact plans, that plans of each class need
                 for the same result; by default as measured with the optimizer
    has_data     True if attach() is given the data, which codes need
    refuse       raises PlanError for plans that can't be run for other reasons
    sweep        also predict the best plans for slower and faster links
    """
    used = optimizer or situation.workload.trained_with or ASSUMED_OPTIMIZER
    advisor = _Advisor(
        situation=situation,
        has_data=has_data,
        refuse=refuse,
        extra=ExtraSteps(optimizer=used.lower(), given=extra_steps or {}),
        progress=progress,
    )
    plans, unfit = advisor.candidates(allow)
    ranking = tuple(advisor.ranked(plans))
    left_out = {**unfit, **advisor.left_out}
    weaker = advisor.next_class(allow) if ranking[0].gain < MIN_ADVISED_SPEEDUP else None
    assumed = [
        *(text for ranked in ranking for text in ranked.estimate.assumed),
        *_assumed_steps([*ranking, *([weaker] if weaker else [])], advisor.extra, optimizer),
    ]
    return Advice(
        situation=situation,
        allow=allow,
        optimizer=advisor.extra.optimizer,
        ranking=ranking,
        verdict=_verdict(ranking),
        next_class=weaker,
        assumed=tuple(dict.fromkeys(assumed)),
        left_out=left_out,
        sweep=_sweep(ranking, situation) if sweep else None,
    )


@dataclass(kw_only=True)
class _Advisor:
    """The arguments of `advise`, and the reasons why plans couldn't be predicted."""

    situation: Situation
    has_data: bool
    refuse: Callable[[Plan], None]
    extra: ExtraSteps
    progress: Progress
    left_out: dict[str, str] = field(default_factory=dict)

    def candidates(self, allow: Promise) -> tuple[list[Plan], dict[str, str]]:
        group = Group.everybody(self.situation.laid_out_for)
        return candidates(
            group, allow, default_catalog(), has_data=self.has_data, refuse=self.refuse
        )

    @cached_property
    def ddp(self) -> Estimate:
        return predict(BASELINE_PLAN, self.situation)

    def ranked(self, plans: Sequence[Plan]) -> list[RankedPlan]:
        large = self.situation.cluster.workers > MAX_WORKERS_ALL_SIMULATED
        rough = self._closed_forms(plans) if large else {}
        found = []
        for number, plan in enumerate(plans):
            self.progress(number, len(plans))
            found += [rough[plan]] if plan in rough else self._simulated(plan)
        found.sort(key=_order)
        best, others = found[:REBUCKETED_PLAN_COUNT], found[REBUCKETED_PLAN_COUNT:]
        for one in [*best, *(one for one in others if str(one.plan) == BASELINE_PLAN)]:
            for smaller in with_smaller_buckets(
                one.plan, self.situation.workload, default_catalog()
            ):
                found += self._simulated(smaller)
        return sorted(_best_buckets(found), key=_order)

    def next_class(self, allow: Promise) -> RankedPlan | None:
        """The best plan of the strongest class that isn't allowed and gains enough."""
        for promise in list(Promise)[len(as_strong_as(allow)) :]:
            plans = [
                plan
                for plan in self.candidates(promise)[0]
                if default_catalog().guarantee(plan).promise is promise
                and self.extra.is_reliable(promise, self.extra.of(plan, promise))
            ]
            for best in self.ranked(plans)[:1]:
                if best.gain >= MIN_ADVISED_SPEEDUP:
                    return best
        return None

    def _ranked_plan(self, estimate: Estimate) -> RankedPlan:
        guarantee = default_catalog().guarantee(estimate.plan)
        more = self.extra.of(estimate.plan, guarantee.promise)
        reliable = self.extra.is_reliable(guarantee.promise, more)
        why = _why(estimate, self.ddp)
        if more is None:
            why += f"; extra steps not measured under {self.extra.optimizer}"
        elif guarantee.promise is not Promise.EXACT:
            why += f"; {more:.0%} more steps" + (
                "" if reliable else " in a short run, and more in a long one"
            )
        return RankedPlan(
            estimate=estimate,
            vs_ddp=self.ddp.seconds / estimate.seconds if estimate.seconds else 1.0,
            promise=guarantee.promise,
            steps=None if more is None else 1 + more,
            reliable=reliable,
            survives=f"late: {guarantee.late}; dead: {guarantee.dead}",
            why=why,
        )

    def _simulated(self, plan: Plan) -> list[RankedPlan]:
        try:
            estimate = self.ddp if str(plan) == BASELINE_PLAN else predict(plan, self.situation)
        except PlanError as error:
            self.left_out[str(plan)] = error.problem
            return []
        return [self._ranked_plan(estimate)]

    def _closed_forms(self, plans: Sequence[Plan]) -> dict[Plan, RankedPlan]:
        """The closed forms of plans that aren't simulated: all but the best by it, and `ddp`, the
        baseline of all."""
        known = []
        for plan in plans:
            if plan.text.preset.name != BASELINE_PLAN:
                with suppress(PlanError):
                    estimate = predict(plan, self.situation, by_form=True)
                    known.append(self._ranked_plan(estimate))
        return {one.plan: one for one in sorted(known, key=_order)[SIMULATED_PLAN_COUNT:]}


def _order(ranked: RankedPlan) -> tuple[int, bool, float]:
    """The sort key of a plan: its cost. Plans with unreliable extra steps come last, class by
    class, and among those the unmeasured ones."""
    last = 0 if ranked.reliable else len(as_strong_as(ranked.promise))
    return last, ranked.steps is None, ranked.estimate.seconds * (ranked.steps or 1.0)


def _best_buckets(ranking: Iterable[RankedPlan]) -> list[RankedPlan]:
    """The best bucket size of each plan, the default unless another gains. `ddp` with its default
    stays, beside its best."""
    best: dict[str, RankedPlan] = {}
    for ranked in ranking:
        name = str(ranked.plan).partition(" @")[0]
        if name == BASELINE_PLAN and str(ranked.plan) != BASELINE_PLAN:
            name = f"{BASELINE_PLAN} in other buckets"
        if name not in best or ranked.estimate.seconds < 0.99 * best[name].estimate.seconds:
            best[name] = ranked
    return list(best.values())


def _why(estimate: Estimate, ddp: Estimate) -> str:
    """The parts of the step time that differ most from DDP's."""
    own, other = _named_parts(estimate), _named_parts(ddp)
    largest = max(own, key=own.__getitem__)
    mostly = f"{own[largest] / (estimate.seconds or 1.0):.0%} of the step time is {largest}"
    if str(estimate.plan) == BASELINE_PLAN:
        return f"the baseline: {mostly}"
    more = {name: own[name] - other[name] for name in own}
    noticed = sorted((s, name) for name, s in more.items() if abs(s) > 0.02 * ddp.seconds)
    changes = [f"{'-' if s < 0 else '+'}{about(abs(s), 's')} {name}" for s, name in noticed]
    return ", ".join(changes) or f"like ddp: {mostly}"


def _named_parts(estimate: Estimate) -> dict[str, float]:
    parts = estimate.parts
    return {
        "compute": parts.compute,
        "encode/decode": parts.encode + parts.decode,
        "exposed communication": parts.transfer,
        "straggler wait": parts.waiting,
    }


def _verdict(ranking: Sequence[RankedPlan]) -> str:
    best = ranking[0]
    if best.gain < MIN_ADVISED_SPEEDUP:
        return "Keep DDP: no allowed plan is predicted to be 5 % faster."
    estimate = best.estimate
    whole = f", {best.gain:.2f}x with its extra steps" if best.gain != best.vs_ddp else ""
    return (
        f"Use {best.plan}: predicted step time {about(estimate.seconds, 's')} "
        f"(80 % interval {about(estimate.low, 's')} to {about(estimate.high, 's')}), "
        f"speed-up {best.vs_ddp:.2f}x per step over DDP{whole}."
    )


def _assumed_steps(
    ranking: Sequence[RankedPlan], extra: ExtraSteps, optimizer: str | None
) -> Iterator[str]:
    """The assumptions behind the extra steps of these plans."""
    classes = {ranked.promise for ranked in ranking} - {Promise.EXACT}
    for promise in Promise:
        if promise in classes and promise in extra.given:
            share = f"{extra.given[promise]:.0%}"
            yield f"{promise.value} plans need {share} more steps than exact ones"
    if classes - {*extra.given}:
        if not optimizer:
            yield f"the optimizer is {extra.optimizer}"
        if extra.source:
            yield extra.source


def _sweep(ranking: Sequence[RankedPlan], situation: Situation) -> Sweep:
    ddp = next(ranked for ranked in ranking if str(ranked.plan) == BASELINE_PLAN)
    plans = dict.fromkeys([*(ranked.plan for ranked in ranking[:SWEPT_PLAN_COUNT]), ddp.plan])
    clusters = [scaled(situation.cluster, factor) for factor in SWEPT_RATE_FACTORS]
    others = [replace(situation, cluster=cluster) for cluster in clusters]
    seconds = {str(plan): tuple(predict(plan, each).seconds for each in others) for plan in plans}
    rates = tuple(slowest_nic(situation.cluster) * factor for factor in SWEPT_RATE_FACTORS)
    return Sweep(rates=rates, seconds=seconds, breaks=tuple(crossovers(rates, seconds)))


def crossovers(rates: Sequence[float], seconds: Mapping[str, Sequence[float]]) -> list[Crossover]:
    """The rates at which the fastest plan changes, interpolated in logarithms."""
    found = []
    for i, (low, high) in enumerate(pairwise(rates)):
        here = min(seconds, key=lambda sync: seconds[sync][i])
        there = min(seconds, key=lambda sync: seconds[sync][i + 1])
        if here == there:
            continue
        gap = log(seconds[there][i] / seconds[here][i])
        end = log(seconds[there][i + 1] / seconds[here][i + 1])
        fraction = gap / (gap - end) if gap != end else 0.5
        rate = exp(log(low) + fraction * log(high / low))
        found.append(Crossover(slower_links=here, faster_links=there, bits_per_second=rate))
    return found

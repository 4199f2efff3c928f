"""From an advice to the plans that can be taken up in this run: what each is predicted to take, and
how many of its steps tell whether that is so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thalweg.catalog import default_catalog
from thalweg.coding import waits_for_nobody
from thalweg.errors import PlanError
from thalweg.facts import Cluster
from thalweg.plan import Plan
from thalweg.predict import Advice, Advised, Estimate, predict
from thalweg.predict.extra_steps import ExtraSteps
from thalweg.rounds import cycle, warm_up
from thalweg.schedules import Group
from thalweg.training.asked import with_settings
from thalweg.training.averager import is_native
from thalweg.training.overlap import SETTLING, TRIALS
from thalweg.training.steering import Prospect
from thalweg.training.surveying import Findings

SKIPPED = 2  # steps that set a plan up
TIMED, TIMED_IF_LATE = 6, 24  # steps that tell what a plan takes
WAITED_FOR = 0.05  # of a step: less isn't worth more steps
LONGEST_CYCLE = 16  # steps; of a longer one a part has to do
RANKED = 12  # plans that all ranks are told of


@dataclass(frozen=True, slots=True)
class Foresight:
    """From `step` on, under what was found. `refuse_here` raises if a plan can't be run."""

    findings: Findings
    group: Group
    asked: Plan
    step: int
    refuse_here: Callable[[Plan], None]

    def refuse(self, candidate: Plan) -> None:
        """Raise PlanError if the plan can't be taken up with the settings that were asked for."""
        plan = with_settings(candidate, self.asked)
        _refuse_own_pace(plan)
        self.refuse_here(plan)
        if is_native(plan) and not self.findings.native:
            raise PlanError(f"the backend of {plan} can't be tried here", "name it")

    def ranking(self, advice: Advice, before: Plan) -> list[Prospect]:
        """Best first, the plan that ran before among them; without those whose extra steps under
        this optimizer can't be relied on."""
        found: dict[str, Prospect] = {}
        for one in advice.ranking:
            plan = with_settings(one.plan, self.asked)
            if one.steps is not None and one.reliable:
                found[str(plan)] = self._prospect(plan, one.steps, one)
        if str(before) not in found:
            extra = ExtraSteps(optimizer=advice.optimizer)
            more = extra.of(before, default_catalog().guarantee(before).promise)
            found[str(before)] = self._prospect(before, 1 + (more or 0.0), None)
        ranking = sorted(found.values(), key=lambda one: one.cost)
        return ranking[:RANKED] + [one for one in ranking[RANKED:] if one.sync == str(before)]

    def _prospect(self, plan: Plan, steps: float, one: Advised | None) -> Prospect:
        same = one is not None and str(plan) == str(one.plan)
        estimate = one.estimate if one is not None and same else self._estimate(plan)
        late = waited_for(self.findings.cluster) > WAITED_FOR * estimate.seconds
        turn = cycle_of(plan, self.group)
        timed = TIMED_IF_LATE if late else TIMED
        return Prospect(
            sync=str(plan),
            seconds=estimate.seconds,
            low=estimate.low,
            high=estimate.high,
            steps=steps,
            settling=settling_of(plan, self.step),
            timed=-(-timed // turn) * turn,
            cycle=turn,
            late=late,
            why=one.why if one else "",
        )

    def _estimate(self, plan: Plan) -> Estimate:
        found = self.findings
        return predict(
            plan, found.cluster, found.workload, found.machine, declared=self.group.cluster
        )


def waited_for(cluster: Cluster) -> float:
    """Seconds of a step, at most and on average, if all wait for whoever is late."""
    late = [cluster.host(rank).late for rank in range(cluster.workers)]
    return sum(one.probability * one.delay.seconds for one in late)


def cycle_of(plan: Plan, group: Group) -> int:
    """Steps after which it repeats itself, as far as they can be waited for."""
    return 1 if waits_for_nobody(plan) else min(cycle(plan, group), LONGEST_CYCLE)


def settling_of(plan: Plan, step: int) -> int:
    """Steps from this one on that don't tell what the plan takes. With a compressor they are tried
    in two ways at first (`overlap.py`)."""
    if plan.precision is None:
        return SKIPPED
    return max(0, warm_up(plan) - step) + SETTLING + 2 * TRIALS


def _refuse_own_pace(plan: Plan) -> None:
    if plan.cadence.staleness is not None:
        raise PlanError(f"under {plan} no step is common to all, at which to measure", "name it")

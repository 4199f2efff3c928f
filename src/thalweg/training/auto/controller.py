"""The controller of `plan="auto"`: it measures while training, and chooses the plan.

    step 0 ...  a plan that runs everywhere; compute time is profiled meanwhile
    step 8      all ranks measure the network together; rank 0 ranks plans; all switch to the best
    later       the step time is compared with its prediction (`policy.py`), and watched

Each decision is an entry of a log in the store, made by one rank at a step that all know, or agreed
on. All ranks fold the same entries into the same state, so all run the same plan from the same safe
point on; a rank that has skipped steps under a code reads the entries that it has missed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from time import monotonic, perf_counter
from typing import Any

import torch

from thalweg.catalog import default_catalog, parse_plan
from thalweg.errors import NotFitted, PlanError, RunError
from thalweg.facts import Cluster, Situation
from thalweg.plan import Plan
from thalweg.predict import Advice, RankedPlan, advise, predict
from thalweg.predict.advisor import ExtraSteps
from thalweg.predict.fitting import FREE_BACKEND_ASSUMPTION
from thalweg.redundancy import waits_for_nobody
from thalweg.schedules import Group
from thalweg.steps import cycle, warm_up
from thalweg.training.auto.measurement import RunCalibrator, profiles_compute_alone
from thalweg.training.auto.policy import (
    AutoState,
    CandidatePlan,
    PlanChoice,
    StepTimeDrift,
    median_step_seconds,
    on_advice,
    on_measured,
    on_no_advice,
    request_advice,
)
from thalweg.training.auto.request import allowed, plan_at_first, with_settings
from thalweg.training.compression_overlap import OVERLAP_TRIAL_STEPS, OVERLAP_WARMUP_STEPS
from thalweg.training.lifecycle import RankSession

ADVICE_CHANGE = "advice"  # in the agreement
ABSENT_RANK_SECONDS = 5.0  # since its last step, under a plan that waits for no rank
PROFILED_STEPS = 8  # before the first advice
ADVISOR_RANK = 0
SKIPPED_PLAN_STEPS = 2  # warm-up
TIMED_PLAN_STEPS, STRAGGLER_TIMED_PLAN_STEPS = 6, 24
MIN_WAITED_STEP_FRACTION = 0.05  # a shorter straggler wait isn't worth more steps
MAX_TIMED_CYCLE_STEPS = 16  # of a longer cycle a part is timed
MAX_RANKED_PLANS = 12  # that are published to all ranks
log = logging.getLogger("thalweg")


@dataclass(frozen=True, slots=True)
class PlanRanker:
    """Ranks the advised plans that this run can switch to at `step`: each with its predicted step
    time, and the number of steps that a measurement takes. `refuse_here` raises if a plan can't
    run."""

    situation: Situation
    group: Group
    requested: Plan
    step: int
    refuse_here: Callable[[Plan], None]

    def refuse(self, candidate: Plan) -> None:
        """Raise PlanError if the plan can't run with the requested settings."""
        plan = with_settings(candidate, self.requested)
        if plan.cadence.staleness is not None:
            raise PlanError(
                f"{plan} has no step common to all ranks, at which to measure", "name the plan"
            )
        self.refuse_here(plan)
        unmeasured = FREE_BACKEND_ASSUMPTION in self.situation.machine.assumed
        if default_catalog().is_native(plan) and unmeasured:
            raise PlanError(f"the backend of {plan} can't be measured here", "name the plan")

    def ranking(self, advice: Advice, before: Plan) -> list[CandidatePlan]:
        """The candidate plans, best first, including the plan that ran before; without plans whose
        extra steps under this optimizer can't be relied on."""
        candidates: dict[str, CandidatePlan] = {}
        for ranked in advice.ranking:
            plan = with_settings(ranked.plan, self.requested)
            if ranked.steps is not None and ranked.reliable:
                candidates[str(plan)] = self._candidate(plan, ranked.steps, ranked)
        if str(before) not in candidates:
            extra = ExtraSteps(optimizer=advice.optimizer)
            more = extra.of(before, default_catalog().guarantee(before).promise)
            candidates[str(before)] = self._candidate(before, 1 + (more or 0.0), None)
        ranking = sorted(candidates.values(), key=lambda candidate: candidate.cost)
        return ranking[:MAX_RANKED_PLANS] + [
            candidate for candidate in ranking[MAX_RANKED_PLANS:] if candidate.sync == str(before)
        ]

    def _candidate(self, plan: Plan, steps: float, ranked: RankedPlan | None) -> CandidatePlan:
        advised = ranked is not None and str(plan) == str(ranked.plan)
        estimate = ranked.estimate if ranked and advised else predict(plan, self.situation)
        late = waiting_seconds(self.situation.cluster) > MIN_WAITED_STEP_FRACTION * estimate.seconds
        period = cycle_of(plan, self.group)
        timed = STRAGGLER_TIMED_PLAN_STEPS if late else TIMED_PLAN_STEPS
        return CandidatePlan(
            sync=str(plan),
            predicted=estimate.seconds,
            low=estimate.low,
            high=estimate.high,
            steps=steps,
            settling=warmup_steps_of(plan, self.step),
            timed=-(-timed // period) * period,
            cycle=period,
            late=late,
            why=ranked.why if ranked else "",
        )


def waiting_seconds(cluster: Cluster) -> float:
    """An upper bound of the mean straggler wait per step, if all ranks wait for all."""
    late = [cluster.host(rank).late for rank in range(cluster.workers)]
    return sum(straggler.probability * straggler.delay.seconds for straggler in late)


def cycle_of(plan: Plan, group: Group) -> int:
    """The period of a plan in steps, as far as it can be waited for."""
    return 1 if waits_for_nobody(plan) else min(cycle(plan, group), MAX_TIMED_CYCLE_STEPS)


def warmup_steps_of(plan: Plan, step: int) -> int:
    """The warm-up steps of a plan from this step on. A compressor is tried during and after
    backward first (`compression_overlap.py`)."""
    if plan.precision is None:
        return SKIPPED_PLAN_STEPS
    return max(0, warm_up(plan) - step) + OVERLAP_WARMUP_STEPS + 2 * OVERLAP_TRIAL_STEPS


class AutoController:
    """Runs `auto` on one rank. `refuse` raises if a plan can't run here; `notify` is called with
    each choice, and again when its step time is known."""

    def __init__(
        self,
        requested: Plan,
        session: RankSession,
        refuse: Callable[[Plan], None],
        notify: Callable[[str, int, str, Any], None],
    ) -> None:
        self.advice: Advice | None = None  # on the advisor
        self._choice: PlanChoice | None = None  # the last
        self._notify = notify
        self._requested = requested
        self._session = session
        self._refuse = refuse
        self._calibrator = RunCalibrator(session, allowed(requested))
        self._state = AutoState(
            sync=str(session.plan),
            since=session.step,
            due=session.step + PROFILED_STEPS,
            awaits_advice=True,
        )
        self._seconds: list[float] = []  # the step times since the last change
        self._median_seconds: dict[str, float] = {}  # step time by plan, on this rank
        self._drift: StepTimeDrift | None = None
        self._proposed = False
        self._now: float | None = None  # the step time, if it has drifted
        self._began: float | None = None
        self._calibrator.start_profile()

    def at_safe_point(self, step: int, drifted_to: float | None) -> None:
        """Apply what is due here. If all ranks have agreed to request advice again, `drifted_to` is
        the present step time in seconds."""
        if drifted_to is not None and not self._state.awaits_advice:
            if self._drift is not None:
                self._median_seconds[self._state.sync] = self._drift.now
            self._request_again(step, drifted_to)
        while self._state.due is not None and self._state.due <= step:
            self._next_entry(step)
        self._began = perf_counter()

    def stepped(self, step: int) -> None:
        """The optimizer has taken this step."""
        if self._began is None:
            return
        seconds = perf_counter() - self._began
        self._began = None
        if self._state.due is not None:
            self._seconds.append(seconds)
        elif self._drift is not None and self._drift.add(seconds):
            self._propose(step, self._drift.now)

    def adjusted(self) -> None:
        """The plan itself has reacted to the network: measure again whether that helps."""
        self._proposed = False
        if self._drift is not None:
            self._drift.begin_again()

    def close(self) -> None:
        """Remove all hooks from the model."""
        self._calibrator.close()

    def _request_again(self, step: int, seconds: float) -> None:
        """Request advice. A plan that waits for no rank has no common step to measure at, so it is
        left first. Compute time is profiled again where a profile is possible."""
        plan = self._session.plan
        if waits_for_nobody(plan):
            plan = plan_at_first(self._requested)
        due = step
        if profiles_compute_alone(plan):
            due += PROFILED_STEPS
            self._calibrator.start_profile()
        self._state = request_advice(self._state, step, str(plan), due)
        self._follow()
        self._now = seconds

    def _propose(self, step: int, seconds: float) -> None:
        session = self._session
        rested = step >= self._state.cooldown_until and not self._proposed
        if rested and session.is_checkpoint_writer and self._all_are_present():
            self._proposed = True
            session.agreement.propose(ADVICE_CHANGE, seconds)

    def _all_are_present(self) -> bool:
        """True if every rank takes steps. Under a code a rank may be absent, and another plan would
        wait for it."""
        membership = self._session.world.membership
        if membership is None or not waits_for_nobody(self._session.plan):
            return True
        stalled = membership.heartbeat.detector.stalled_seconds(monotonic())
        return not membership.suspected and stalled < ABSENT_RANK_SECONDS

    # The log

    def _next_entry(self, step: int) -> None:
        state, due = self._state, self._state.due
        key = f"auto/{due}"
        if due == step:
            self._make_entry(key, step)
        world = self._session.world
        late = RunError(
            f"rank {world.rank} timed out waiting for the choice of a plan ({world.timeout:g} s)",
            "look at the output of rank 0, or allow more with timeout=",
        )
        entry = json.loads(world.read(key, self._session.abort_flag, late))
        self._state = _folded(state, entry)
        self._note(state, entry)
        if due == step:
            self._follow()

    def _make_entry(self, key: str, step: int) -> None:
        """Write the log entry, on the rank that has to; the others take part where all wait for
        all."""
        session, author = self._session, self._session.is_checkpoint_writer
        entry: dict[str, Any] = {}
        if self._state.awaits_advice:
            author = session.rank == ADVISOR_RANK
            entry = self._advice(step, self._measured() if self._now is None else self._now)
        elif author or not waits_for_nobody(session.plan):
            entry = {"step": step, "seconds": self._measured()}
            entry["may_leave"] = author and self._all_are_present()
        if author:
            session.world.put(key, json.dumps(entry))

    def _measured(self) -> float:
        """The step time of the current plan: the mean over all ranks, or the leader's own if no
        rank waits. This rank's median is kept for later comparison."""
        candidate = self._state.candidate
        skipped, cycle = (
            (candidate.settling, candidate.cycle) if candidate else (SKIPPED_PLAN_STEPS, 1)
        )
        timed = self._seconds[skipped:] or self._seconds
        self._median_seconds[self._state.sync] = median_step_seconds(timed, cycle)
        late = candidate is not None and candidate.late
        seconds = torch.tensor([fmean(timed) if late else median_step_seconds(timed, cycle)])
        if not waits_for_nobody(self._session.plan):
            self._session.collectives.all_reduce_mean([seconds])
        return float(seconds)

    def _follow(self) -> None:
        """Run the plan of the current state, and watch its step time."""
        self._seconds = []
        self._now = None
        self._proposed = False
        if str(self._session.plan) != self._state.sync:
            self._session.switch_plan(parse_plan(self._state.sync))
        self._drift = None
        candidate = self._state.candidate
        if self._state.due is None and self._state.sync in self._median_seconds:
            cycle = candidate.cycle if candidate else 1
            self._drift = StepTimeDrift(self._median_seconds[self._state.sync], cycle)

    def _note(self, before: AutoState, entry: Mapping[str, Any]) -> None:
        """Record and log the choice."""
        logs = self._session.rank == 0
        if "seconds" in entry and self._choice is not None:
            self._choice = replace(self._choice, measured=entry["seconds"])
            self._notify("auto", entry["step"], str(self._choice), self._choice)
            if logs:
                log.info("%s", self._choice)
        if "problem" in entry and logs:
            log.warning("no advice, %s stays: %s", self._state.sync, entry["problem"])
        chosen = self._state.chosen()
        if chosen is not None and ("ranking" in entry or self._state.sync != before.sync):
            tried = None if "ranking" in entry else self._state.tried.get(chosen.sync)
            self._choice = replace(chosen, measured=tried)
            verdict = f"from step {chosen.step}: {chosen.sync} ({chosen.reason})"
            if self.advice is not None and "ranking" in entry:  # the plan that runs
                verdict += self.advice.hint("; with auto(allow={})")
                self.advice = replace(self.advice, verdict=verdict)
            self._notify("auto", entry["step"], verdict, self._choice)
            if logs:
                log.info("%s", verdict)

    # Advice

    def _advice(self, step: int, now: float) -> dict[str, Any]:
        """The advisor's entry, after all ranks have measured. Implausible measurements or a failing
        advisor don't end the training; an unreachable rank does."""
        try:
            situation = self._calibrator.calibrate()
        except NotFitted as error:
            return {"step": step, "problem": error.problem}
        if self._session.rank != ADVISOR_RANK:
            return {}
        try:
            ranking = self._ranking(situation, step)
        except Exception as error:
            return {"step": step, "problem": f"{type(error).__name__}: {error}"}
        return {"step": step, "now": now, "ranking": [asdict(candidate) for candidate in ranking]}

    def _ranking(self, situation: Situation, step: int) -> list[CandidatePlan]:
        group, has_data = self._session.group, self._session.data_position.rank_loader is not None
        ranker = PlanRanker(situation, group, self._requested, step, self._refuse)
        self.advice = advise(
            situation,
            allow=allowed(self._requested),
            optimizer=situation.workload.trained_with,
            has_data=has_data,
            refuse=ranker.refuse,
        )
        if not has_data:
            log.info("coded plans are not ranked: they need data= and batch= in attach()")
        return ranker.ranking(self.advice, parse_plan(self._state.came_from or self._state.sync))


def _folded(state: AutoState, entry: Mapping[str, Any]) -> AutoState:
    step = entry["step"]
    if "problem" in entry:
        return on_no_advice(state, step, entry["problem"])
    if "ranking" in entry:
        return on_advice(
            state,
            step,
            [CandidatePlan(**candidate) for candidate in entry["ranking"]],
            entry["now"],
        )
    return on_measured(state, step, entry["seconds"], may_leave=entry["may_leave"])

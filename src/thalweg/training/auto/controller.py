"""`sync="auto"`: the plan is chosen while training, by what is measured there.

    step 0 ...  a plan that runs everywhere; what is computed is timed meanwhile
    step 8      all ranks measure the network together; rank 0 asks for advice; all take up the best
    later       what a step takes is compared with what was predicted (`steering.py`), and watched

Each decision is an entry of a log in the store, made by one rank at a step that all know, or agreed
on. All ranks fold the same entries into the same heading, so all run the same plan from the same
safe point on; one that has left out steps under a code reads what it has missed. One that was
restarted can't return: the plan that runs by now may have no place for it (`attaching.py`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from time import perf_counter
from typing import Any

import torch

from thalweg.catalog import default_catalog, parse_plan
from thalweg.engine.collectives import Collectives
from thalweg.errors import NotFitted, PlanError, RunError
from thalweg.facts import Cluster
from thalweg.members.world import World
from thalweg.plan import Plan
from thalweg.predict import Advice, Estimate, RankedPlan, advise, predict
from thalweg.predict.extra_steps import ExtraSteps
from thalweg.redundancy import waits_for_nobody
from thalweg.schedules import Group
from thalweg.steps import cycle, warm_up
from thalweg.training.auto.measurement import RunCalibrator, RunSituation, profiles_compute_alone
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
from thalweg.training.factory import PlanContext

ADVICE_CHANGE = "advice"  # in the agreement
PROFILED_STEPS = 8  # steps before the first advice
ASYNC_SIGN_PERIOD_STEPS = 8  # steps between two, where nobody waits for anybody
ASYNC_SIGN_TIMEOUT_STEPS = 8 * ASYNC_SIGN_PERIOD_STEPS  # steps after the last
ADVISOR_RANK = 0  # rank
SKIPPED_PLAN_STEPS = 2  # steps that set a plan up
TIMED_PLAN_STEPS, STRAGGLER_TIMED_PLAN_STEPS = 6, 24  # steps that tell what a plan takes
MIN_WAITED_STEP_FRACTION = 0.05  # of a step: less isn't worth more steps
MAX_TIMED_CYCLE_STEPS = 16  # steps; of a longer one a part has to do
MAX_RANKED_PLANS = 12  # plans that all ranks are told of
log = logging.getLogger("thalweg")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanControls:
    """What the run lets `auto` do. `refuse` raises if a plan can't be run here."""

    plan: Callable[[], Plan]
    switch_plan: Callable[[Plan], None]
    refuse: Callable[[Plan], None]
    calibrator: RunCalibrator


@dataclass(frozen=True, slots=True)
class PlanRanker:
    """From an advice to the plans that can be taken up in this run from `step` on: what each is
    predicted to take under what was found, and how many of its steps tell whether that is so.
    `refuse_here` raises if a plan can't be run."""

    situation: RunSituation
    group: Group
    requested: Plan
    step: int
    refuse_here: Callable[[Plan], None]

    def refuse(self, candidate: Plan) -> None:
        """Raise PlanError if the plan can't be taken up with the settings that were asked for."""
        plan = with_settings(candidate, self.requested)
        _refuse_own_pace(plan)
        self.refuse_here(plan)
        if default_catalog().is_native(plan) and not self.situation.native:
            raise PlanError(f"the backend of {plan} can't be tried here", "name it")

    def ranking(self, advice: Advice, before: Plan) -> list[CandidatePlan]:
        """Best first, the plan that ran before among them; without those whose extra steps under
        this optimizer can't be relied on."""
        found: dict[str, CandidatePlan] = {}
        for ranked in advice.ranking:
            plan = with_settings(ranked.plan, self.requested)
            if ranked.steps is not None and ranked.reliable:
                found[str(plan)] = self._candidate(plan, ranked.steps, ranked)
        if str(before) not in found:
            extra = ExtraSteps(optimizer=advice.optimizer)
            more = extra.of(before, default_catalog().guarantee(before).promise)
            found[str(before)] = self._candidate(before, 1 + (more or 0.0), None)
        ranking = sorted(found.values(), key=lambda candidate: candidate.cost)
        return ranking[:MAX_RANKED_PLANS] + [
            candidate for candidate in ranking[MAX_RANKED_PLANS:] if candidate.sync == str(before)
        ]

    def _candidate(self, plan: Plan, steps: float, ranked: RankedPlan | None) -> CandidatePlan:
        same = ranked is not None and str(plan) == str(ranked.plan)
        estimate = ranked.estimate if ranked is not None and same else self._estimate(plan)
        late = waiting_seconds(self.situation.cluster) > MIN_WAITED_STEP_FRACTION * estimate.seconds
        turn = cycle_of(plan, self.group)
        timed = STRAGGLER_TIMED_PLAN_STEPS if late else TIMED_PLAN_STEPS
        return CandidatePlan(
            sync=str(plan),
            seconds=estimate.seconds,
            low=estimate.low,
            high=estimate.high,
            steps=steps,
            settling=warmup_steps_of(plan, self.step),
            timed=-(-timed // turn) * turn,
            cycle=turn,
            late=late,
            why=ranked.why if ranked else "",
        )

    def _estimate(self, plan: Plan) -> Estimate:
        found = self.situation
        return predict(
            plan, found.cluster, found.workload, found.machine, declared=self.group.cluster
        )


def waiting_seconds(cluster: Cluster) -> float:
    """Seconds of a step, at most and on average, if all wait for whoever is late."""
    late = [cluster.host(rank).late for rank in range(cluster.workers)]
    return sum(one.probability * one.delay.seconds for one in late)


def cycle_of(plan: Plan, group: Group) -> int:
    """Steps after which it repeats itself, as far as they can be waited for."""
    return 1 if waits_for_nobody(plan) else min(cycle(plan, group), MAX_TIMED_CYCLE_STEPS)


def warmup_steps_of(plan: Plan, step: int) -> int:
    """Steps from this one on that don't tell what the plan takes. With a compressor they are tried
    in two ways at first (`overlap.py`)."""
    if plan.precision is None:
        return SKIPPED_PLAN_STEPS
    return max(0, warm_up(plan) - step) + OVERLAP_WARMUP_STEPS + 2 * OVERLAP_TRIAL_STEPS


def _refuse_own_pace(plan: Plan) -> None:
    if plan.cadence.staleness is not None:
        raise PlanError(f"under {plan} no step is common to all, at which to measure", "name it")


class AutoController:
    """`step` is the first that is run."""

    def __init__(
        self,
        plan: Plan,
        setting: PlanContext,
        collectives: Collectives,
        controls: PlanControls,
        step: int,
    ) -> None:
        self.advice: Advice | None = None  # on the advisor
        self.choices: list[PlanChoice] = []
        self._requested = plan
        self._setting = setting
        self._collectives = collectives
        self._controls = controls
        first = str(controls.plan())
        self._state = AutoState(
            sync=first, since=step, due=step + PROFILED_STEPS, awaits_advice=True
        )
        self._entries = 0
        self._seconds: list[float] = []  # of the steps since the last change
        self._median_seconds: dict[str, float] = {}  # seconds by plan, on this rank
        self._drift: StepTimeDrift | None = None
        self._proposed = False
        self._now: float | None = None  # seconds of a step, if they have drifted
        self._began: float | None = None
        controls.calibrator.start_profile()

    def at_safe_point(self, step: int, drifted_to: float | None) -> None:
        """Take up what is due here. If all have agreed to ask for advice again, `drifted_to` is
        what a step takes by now, in seconds."""
        if drifted_to is not None and not self._state.awaits_advice:
            if self._drift is not None:
                self._median_seconds[self._state.sync] = self._drift.now
            self._request_again(step, drifted_to)
        while self._state.due is not None and self._state.due <= step:
            self._next_entry(step)
        if step % ASYNC_SIGN_PERIOD_STEPS == 0:
            self._give_sign_of_life(step)
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
        """The plan itself has done something about the network: look whether it helps."""
        self._proposed = False
        if self._drift is not None:
            self._drift.begin_again()

    def close(self) -> None:
        """Leave the model as it was."""
        self._controls.calibrator.close()

    @property
    def _world(self) -> World:
        return self._setting.world

    @property
    def _leader(self) -> int:
        """Whom nobody can do without under the plan that runs."""
        return self._setting.checkpoint_writer(self._controls.plan())

    def _request_again(self, step: int, seconds: float) -> None:
        """Where nobody waits for anybody, there is no common step to measure at: leave such a plan
        first. What is computed is looked at anew where it can be seen."""
        plan = self._controls.plan()
        if waits_for_nobody(plan):
            plan = plan_at_first(self._requested)
        due = step
        if profiles_compute_alone(plan):
            due += PROFILED_STEPS
            self._controls.calibrator.start_profile()
        self._state = request_advice(self._state, step, str(plan), due)
        self._follow()
        self._now = seconds

    def _propose(self, step: int, seconds: float) -> None:
        rested = step >= self._state.cooldown_until and not self._proposed
        if rested and self._world.rank == self._leader and self._all_are_there(step):
            self._proposed = True
            self._setting.agreement.propose(ADVICE_CHANGE, seconds)

    def _all_are_there(self, step: int) -> bool:
        """Under a code some may be gone, whom another plan would wait for in vain."""
        if not waits_for_nobody(self._controls.plan()):
            return True
        keys = [_sign_of_life(rank) for rank in range(self._world.size)]
        told = self._world.store_client.call(
            lambda store: store.multi_get(keys) if store.check(keys) else None
        )
        return told is not None and min(map(int, told)) >= step - ASYNC_SIGN_TIMEOUT_STEPS

    def _give_sign_of_life(self, step: int) -> None:
        if waits_for_nobody(self._controls.plan()):
            self._world.put(_sign_of_life(self._world.rank), str(step))

    # The log

    def _next_entry(self, step: int) -> None:
        state, due = self._state, self._state.due
        key = f"auto/{self._entries}"
        if due == step:
            self._make_entry(key, step)
        entry = self._read(key)
        self._entries += 1
        self._state = _folded(state, entry)
        self._note(state, entry)
        if due == step:
            self._follow()
            self._give_sign_of_life(step)

    def _make_entry(self, key: str, step: int) -> None:
        """On the rank whose turn it is, with the others' help where all wait for all."""
        author = self._world.rank == (ADVISOR_RANK if self._state.awaits_advice else self._leader)
        entry: dict[str, Any] = {}
        if self._state.awaits_advice:
            now = self._measured() if self._now is None else self._now
            entry = self._advice(step, now)
        elif author or not waits_for_nobody(self._controls.plan()):
            entry = {"step": step, "seconds": self._measured()}
            entry["may_leave"] = author and self._all_are_there(step)
        if author:
            self._world.put(key, json.dumps(entry))

    def _measured(self) -> float:
        """What a step of the plan that runs takes: on this rank, for later comparison; and the mean
        over all ranks, or the leader's own if nobody waits for anybody."""
        candidate = self._state.candidate
        skipped, cycle = (
            (candidate.settling, candidate.cycle) if candidate else (SKIPPED_PLAN_STEPS, 1)
        )
        timed = self._seconds[skipped:] or self._seconds
        self._median_seconds[self._state.sync] = median_step_seconds(timed, cycle)
        late = candidate is not None and candidate.late
        seconds = torch.tensor([fmean(timed) if late else median_step_seconds(timed, cycle)])
        if not waits_for_nobody(self._controls.plan()):
            self._collectives.all_reduce_mean([seconds])
        return float(seconds)

    def _read(self, key: str) -> dict[str, Any]:
        found = self._world.wait_for(key, self._setting.engine.timeout, self._setting.abort_flag)
        if found is None:
            raise RunError(
                f"rank {self._world.rank} waited {self._setting.engine.timeout:g} s to be told "
                "which plan to run",
                "look at what rank 0 does, or allow more with timeout=",
            )
        entry: dict[str, Any] = json.loads(found)
        return entry

    def _follow(self) -> None:
        """Run what the heading says, and watch it anew."""
        self._seconds = []
        self._now = None
        self._proposed = False
        if str(self._controls.plan()) != self._state.sync:
            self._controls.switch_plan(parse_plan(self._state.sync))
        self._drift = None
        candidate = self._state.candidate
        if self._state.due is None and self._state.sync in self._median_seconds:
            cycle = candidate.cycle if candidate else 1
            self._drift = StepTimeDrift(self._median_seconds[self._state.sync], cycle)

    def _note(self, before: AutoState, entry: Mapping[str, Any]) -> None:
        """For the script to read, and for people."""
        speaks = self._world.rank == 0
        if "seconds" in entry and self.choices:
            self.choices[-1] = replace(self.choices[-1], measured=entry["seconds"])
            if speaks:
                log.info("%s", self.choices[-1])
        if "problem" in entry and speaks:
            log.warning("no advice, %s goes on: %s", self._state.sync, entry["problem"])
        chosen = self._state.chosen()
        if chosen is not None and ("ranking" in entry or self._state.sync != before.sync):
            tried = None if "ranking" in entry else self._state.tried.get(chosen.sync)
            self.choices.append(replace(chosen, measured=tried))
            verdict = f"from step {chosen.step}: {chosen.sync} ({chosen.reason})"
            if self.advice is not None and "ranking" in entry:  # what is done, and nothing else
                verdict += self.advice.hint("; with auto(allow={})")
                self.advice = replace(self.advice, verdict=verdict)
            if speaks:
                log.info("%s", verdict)

    # Advice

    def _advice(self, step: int, now: float) -> dict[str, Any]:
        """By the advisor, after all have measured. Figures that make no sense don't end the
        training, nor does an advisor that fails; a rank that isn't reached meanwhile does."""
        try:
            situation = self._controls.calibrator.calibrate()
        except NotFitted as error:
            return {"step": step, "problem": error.problem}
        if self._world.rank != ADVISOR_RANK:
            return {}
        try:
            ranking = self._ranking(situation, step)
        except Exception as error:
            return {"step": step, "problem": f"{type(error).__name__}: {error}"}
        return {"step": step, "now": now, "ranking": [asdict(candidate) for candidate in ranking]}

    def _ranking(self, situation: RunSituation, step: int) -> list[CandidatePlan]:
        group, has_data = self._setting.group, self._setting.data_position.rank_loader is not None
        foresight = PlanRanker(situation, group, self._requested, step, self._controls.refuse)
        self.advice = advise(
            situation.cluster,
            situation.workload,
            situation.machine,
            allow=allowed(self._requested),
            optimizer=situation.workload.trained_with,
            declared=group.cluster,
            has_data=has_data,
            refuse=foresight.refuse,
        )
        if not has_data:
            log.info("plans with a code are left out: they need data= and batch= in attach()")
        before = parse_plan(self._state.came_from or self._state.sync)
        return foresight.ranking(self.advice, before)


def _folded(state: AutoState, entry: Mapping[str, Any]) -> AutoState:
    step = entry["step"]
    if "problem" in entry:
        return on_no_advice(state, step, entry["problem"])
    if "ranking" in entry:
        ranking = [CandidatePlan(**one) for one in entry["ranking"]]
        return on_advice(state, step, ranking, entry["now"])
    return on_measured(state, step, entry["seconds"], may_leave=entry["may_leave"])


def _sign_of_life(rank: int) -> str:
    return f"auto/at/{rank}"

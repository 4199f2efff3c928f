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
from thalweg.errors import NotFitted, PlanError, RunError
from thalweg.facts import Cluster
from thalweg.members.world import World
from thalweg.plan import Plan
from thalweg.predict import Advice, Advised, Estimate, advise, predict
from thalweg.predict.extra_steps import ExtraSteps
from thalweg.redundancy import waits_for_nobody
from thalweg.schedules import Group
from thalweg.steps import cycle, warm_up
from thalweg.training.auto.measurement import Findings, Surveyor, tells_what_is_computed
from thalweg.training.auto.policy import (
    Chosen,
    Drift,
    Heading,
    Prospect,
    advised,
    ask,
    measured,
    usual,
    without_advice,
)
from thalweg.training.auto.request import allowed, plan_at_first, with_settings
from thalweg.training.compression_overlap import SETTLING, TRIALS
from thalweg.training.factory import Setting, is_native
from thalweg.training.sharing import Sharing

CHANGE = "advice"  # in the agreement
PROFILED = 8  # steps before the first advice
SIGN_OF_LIFE = 8  # steps between two, where nobody waits for anybody
GONE = 8 * SIGN_OF_LIFE  # steps after the last
ADVISOR = 0  # rank
SKIPPED = 2  # steps that set a plan up
TIMED, TIMED_IF_LATE = 6, 24  # steps that tell what a plan takes
WAITED_FOR = 0.05  # of a step: less isn't worth more steps
LONGEST_CYCLE = 16  # steps; of a longer one a part has to do
RANKED = 12  # plans that all ranks are told of
log = logging.getLogger("thalweg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Helm:
    """What the run lets `auto` do. `refuse` raises if a plan can't be run here."""

    plan: Callable[[], Plan]
    take_up: Callable[[Plan], None]
    refuse: Callable[[Plan], None]
    surveyor: Surveyor


@dataclass(frozen=True, slots=True)
class Foresight:
    """From an advice to the plans that can be taken up in this run from `step` on: what each is
    predicted to take under what was found, and how many of its steps tell whether that is so.
    `refuse_here` raises if a plan can't be run."""

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


class Autopilot:
    """`step` is the first that is run."""

    def __init__(
        self, plan: Plan, setting: Setting, sharing: Sharing, helm: Helm, step: int
    ) -> None:
        self.advice: Advice | None = None  # on the advisor
        self.choices: list[Chosen] = []
        self._asked = plan
        self._setting = setting
        self._sharing = sharing
        self._helm = helm
        first = str(helm.plan())
        self._heading = Heading(sync=first, since=step, due=step + PROFILED, asks=True)
        self._entries = 0
        self._seconds: list[float] = []  # of the steps since the last change
        self._usual: dict[str, float] = {}  # seconds by plan, on this rank
        self._drift: Drift | None = None
        self._proposed = False
        self._now: float | None = None  # seconds of a step, if they have drifted
        self._began: float | None = None
        helm.surveyor.watch()

    def at_safe_point(self, step: int, drifted_to: float | None) -> None:
        """Take up what is due here. If all have agreed to ask for advice again, `drifted_to` is
        what a step takes by now, in seconds."""
        if drifted_to is not None and not self._heading.asks:
            if self._drift is not None:
                self._usual[self._heading.sync] = self._drift.now
            self._ask_again(step, drifted_to)
        while self._heading.due is not None and self._heading.due <= step:
            self._next_entry(step)
        if step % SIGN_OF_LIFE == 0:
            self._give_sign_of_life(step)
        self._began = perf_counter()

    def stepped(self, step: int) -> None:
        """The optimizer has taken this step."""
        if self._began is None:
            return
        seconds = perf_counter() - self._began
        self._began = None
        if self._heading.due is not None:
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
        self._helm.surveyor.close()

    @property
    def _world(self) -> World:
        return self._setting.world

    @property
    def _leader(self) -> int:
        """Whom nobody can do without under the plan that runs."""
        return self._setting.keeper(self._helm.plan())

    def _ask_again(self, step: int, seconds: float) -> None:
        """Where nobody waits for anybody, there is no common step to measure at: leave such a plan
        first. What is computed is looked at anew where it can be seen."""
        plan = self._helm.plan()
        if waits_for_nobody(plan):
            plan = plan_at_first(self._asked)
        due = step
        if tells_what_is_computed(plan):
            due += PROFILED
            self._helm.surveyor.watch()
        self._heading = ask(self._heading, step, str(plan), due)
        self._follow()
        self._now = seconds

    def _propose(self, step: int, seconds: float) -> None:
        rested = step >= self._heading.rests_until and not self._proposed
        if rested and self._world.rank == self._leader and self._all_are_there(step):
            self._proposed = True
            self._setting.agreement.propose(CHANGE, seconds)

    def _all_are_there(self, step: int) -> bool:
        """Under a code some may be gone, whom another plan would wait for in vain."""
        if not waits_for_nobody(self._helm.plan()):
            return True
        keys = [_sign_of_life(rank) for rank in range(self._world.size)]
        told = self._world.line.ask(
            lambda store: store.multi_get(keys) if store.check(keys) else None
        )
        return told is not None and min(map(int, told)) >= step - GONE

    def _give_sign_of_life(self, step: int) -> None:
        if waits_for_nobody(self._helm.plan()):
            self._world.put(_sign_of_life(self._world.rank), str(step))

    # The log

    def _next_entry(self, step: int) -> None:
        heading, due = self._heading, self._heading.due
        key = f"auto/{self._entries}"
        if due == step:
            self._make_entry(key, step)
        entry = self._read(key)
        self._entries += 1
        self._heading = _folded(heading, entry)
        self._note(heading, entry)
        if due == step:
            self._follow()
            self._give_sign_of_life(step)

    def _make_entry(self, key: str, step: int) -> None:
        """On the rank whose turn it is, with the others' help where all wait for all."""
        author = self._world.rank == (ADVISOR if self._heading.asks else self._leader)
        entry: dict[str, Any] = {}
        if self._heading.asks:
            now = self._measured() if self._now is None else self._now
            entry = self._advice(step, now)
        elif author or not waits_for_nobody(self._helm.plan()):
            entry = {"step": step, "seconds": self._measured()}
            entry["may_leave"] = author and self._all_are_there(step)
        if author:
            self._world.put(key, json.dumps(entry))

    def _measured(self) -> float:
        """What a step of the plan that runs takes: on this rank, for later comparison; and the mean
        over all ranks, or the leader's own if nobody waits for anybody."""
        prospect = self._heading.prospect
        skipped, cycle = (prospect.settling, prospect.cycle) if prospect else (SKIPPED, 1)
        timed = self._seconds[skipped:] or self._seconds
        self._usual[self._heading.sync] = usual(timed, cycle)
        late = prospect is not None and prospect.late
        seconds = torch.tensor([fmean(timed) if late else usual(timed, cycle)])
        if not waits_for_nobody(self._helm.plan()):
            self._sharing.average([seconds])
        return float(seconds)

    def _read(self, key: str) -> dict[str, Any]:
        found = self._world.wait_for(key, self._setting.engine.timeout, self._setting.alarm)
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
        if str(self._helm.plan()) != self._heading.sync:
            self._helm.take_up(parse_plan(self._heading.sync))
        self._drift = None
        prospect = self._heading.prospect
        if self._heading.due is None and self._heading.sync in self._usual:
            cycle = prospect.cycle if prospect else 1
            self._drift = Drift(self._usual[self._heading.sync], cycle)

    def _note(self, before: Heading, entry: Mapping[str, Any]) -> None:
        """For the script to read, and for people."""
        speaks = self._world.rank == 0
        if "seconds" in entry and self.choices:
            self.choices[-1] = replace(self.choices[-1], measured=entry["seconds"])
            if speaks:
                log.info("%s", self.choices[-1])
        if "problem" in entry and speaks:
            log.warning("no advice, %s goes on: %s", self._heading.sync, entry["problem"])
        chosen = self._heading.chosen()
        if chosen is not None and ("ranking" in entry or self._heading.sync != before.sync):
            tried = None if "ranking" in entry else self._heading.tried.get(chosen.sync)
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
            findings = self._helm.surveyor.survey()
        except NotFitted as error:
            return {"step": step, "problem": error.problem}
        if self._world.rank != ADVISOR:
            return {}
        try:
            ranking = self._ranking(findings, step)
        except Exception as error:
            return {"step": step, "problem": f"{type(error).__name__}: {error}"}
        return {"step": step, "now": now, "ranking": [asdict(one) for one in ranking]}

    def _ranking(self, findings: Findings, step: int) -> list[Prospect]:
        group, has_data = self._setting.group, self._setting.course.feed is not None
        foresight = Foresight(findings, group, self._asked, step, self._helm.refuse)
        self.advice = advise(
            findings.cluster,
            findings.workload,
            findings.machine,
            allow=allowed(self._asked),
            optimizer=findings.workload.trained_with,
            declared=group.cluster,
            has_data=has_data,
            refuse=foresight.refuse,
        )
        if not has_data:
            log.info("plans with a code are left out: they need data= and batch= in attach()")
        before = parse_plan(self._heading.came_from or self._heading.sync)
        return foresight.ranking(self.advice, before)


def _folded(heading: Heading, entry: Mapping[str, Any]) -> Heading:
    step = entry["step"]
    if "problem" in entry:
        return without_advice(heading, step, entry["problem"])
    if "ranking" in entry:
        ranking = [Prospect(**one) for one in entry["ranking"]]
        return advised(heading, step, ranking, entry["now"])
    return measured(heading, step, entry["seconds"], may_leave=entry["may_leave"])


def _sign_of_life(rank: int) -> str:
    return f"auto/at/{rank}"

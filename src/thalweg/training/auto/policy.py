"""Which plan `auto` runs next: decisions alone, the same on every rank that is told the same.

    advised   the best plan is taken up, unless the one that runs is predicted to be as good
    measured  a few steps later it is known what it takes. If that is more than another plan was
              predicted to take, that one is tried, and in the end the best that was measured stays
    drifting  once a step takes much less or more than it was measured to, advice is asked for again

It doesn't flap. A change must promise more than noise; and after an advice some steps pass before
the next, twice as many if the plan has stayed, or if it is asked for again soon after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from thalweg.facts import about

# Of the time of the plan that runs: what is above isn't worth a change at first.
FIRST_SWITCH_COST_RATIO = 0.98
SWITCH_COST_RATIO = 0.95  # the same of what it was measured to take, later
RIVAL_COST_FACTOR = 1.03  # times what another is predicted to take, before that one is tried
MAX_PLAN_TRIALS = 3  # of plans, after an advice
ADVICE_COOLDOWN_STEPS, MAX_ADVICE_COOLDOWN_STEPS = 30, 4000  # steps from one advice to the next
SOON_ADVICE_COOLDOWN_FACTOR = 4  # times the pause
STEP_TIME_WINDOW_STEPS = 8  # steps at least, to tell what is usual now
STEP_TIME_DRIFT_FACTOR = 1.25  # times slower or faster than it was
STEP_TIME_DRIFT_STEPS = 8  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePlan:
    """A plan that can be run here, and what a step of it is predicted to take."""

    sync: str
    seconds: float
    low: float
    high: float
    steps: float = 1.0  # that it is assumed to need for one of an exact plan
    settling: int = 2  # steps that don't tell what it takes
    timed: int = 6  # steps that do, after those
    cycle: int = 1  # steps after which it repeats itself
    late: bool = False  # some steps wait for late workers: all of them count, not the usual one
    why: str = ""

    @property
    def cost(self) -> float:
        return self.steps * self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """From `step` on this plan is run. `measured` is None until it is known, in seconds."""

    step: int
    sync: str
    predicted: float
    low: float
    high: float
    measured: float | None = None
    reason: str

    def __str__(self) -> str:
        text = f"{self.sync}: predicted {about(self.predicted, 's')}"
        text += f" ({about(self.low, 's')} to {about(self.high, 's')})"
        return text + (
            f", measured {about(self.measured, 's')}" if self.measured is not None else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoState:
    """What is run, since when, and the step at which something is due: advice, or what a step
    takes. None while nothing is."""

    sync: str
    since: int
    due: int | None
    awaits_advice: bool = False  # for advice
    advices: int = 0  # so far
    ranking: Sequence[CandidatePlan] = ()  # best first; empty until the first advice
    tried: Mapping[str, float] = field(default_factory=dict)  # seconds, since the last advice
    trials: int = 0
    came_from: str = ""  # what ran when advice was asked for
    soon: bool = False  # after the last advice
    cooldown: int = ADVICE_COOLDOWN_STEPS
    cooldown_until: int = 0
    reason: str = ""

    @property
    def candidate(self) -> CandidatePlan | None:
        return next((candidate for candidate in self.ranking if candidate.sync == self.sync), None)

    def chosen(self) -> PlanChoice | None:
        candidate = self.candidate
        if candidate is None:
            return None
        return PlanChoice(
            step=self.since,
            sync=self.sync,
            predicted=candidate.seconds,
            low=candidate.low,
            high=candidate.high,
            reason=self.reason,
        )


def request_advice(state: AutoState, step: int, meanwhile: str, due: int) -> AutoState:
    """For advice, which is to come at step `due`; until then another plan may be run."""
    quiet = step - (state.cooldown_until - state.cooldown)
    return replace(
        state,
        sync=meanwhile,
        since=step,
        due=due,
        awaits_advice=True,
        came_from=state.sync,
        soon=quiet < SOON_ADVICE_COOLDOWN_FACTOR * state.cooldown,
    )


def on_advice(
    state: AutoState, step: int, ranking: Sequence[CandidatePlan], now: float
) -> AutoState:
    """Take up the best, or stay; `now` is what a step usually takes under the plan that runs, which
    is in the ranking too."""
    before = state.came_from or state.sync
    first = not state.advices
    own = next((candidate for candidate in ranking if candidate.sync == before), None)
    best = ranking[0]
    seen = own is not None and not own.late  # a few steps tell little where some are late
    state = replace(
        state,
        ranking=tuple(ranking),
        tried={before: now} if seen else {},
        trials=1,
        came_from=before,
        awaits_advice=False,
        advices=state.advices + 1,
    )
    worth_it = own is None or (
        best.cost < FIRST_SWITCH_COST_RATIO * own.cost
        and (first or own.late or best.cost < SWITCH_COST_RATIO * own.steps * now)
    )
    if worth_it:
        return _try(state, step, best, best.why)
    assert own is not None
    gain = "2 %" if first else "5 %"
    return _try(state, step, own, f"nothing else promises to gain {gain} on it")


def on_no_advice(state: AutoState, step: int, problem: str) -> AutoState:
    """There was none: stay."""
    before = state.came_from or state.sync
    state = replace(
        state, sync=before, awaits_advice=False, advices=state.advices + 1, reason=problem
    )
    return _rest(state, step)


def on_measured(
    state: AutoState, step: int, seconds: float, *, may_leave: bool = True
) -> AutoState:
    """What a step of the plan that runs takes: stay, try another, or go back to a better one."""
    tried = {**state.tried, state.sync: seconds}
    state = replace(state, tried=tried)
    costs = {
        candidate.sync: candidate.steps * tried[candidate.sync]
        for candidate in state.ranking
        if candidate.sync in tried
    }
    known = {_name(sync) for sync in tried}
    rival = next(
        (candidate for candidate in state.ranking if _name(candidate.sync) not in known), None
    )
    if not may_leave or state.sync not in costs:
        return _rest(state, step)
    if (
        rival is not None
        and state.trials < MAX_PLAN_TRIALS
        and RIVAL_COST_FACTOR * rival.cost < min(costs.values())
    ):
        reason = f"{state.sync} takes {about(seconds, 's')}, more than is predicted of this"
        return _try(replace(state, trials=state.trials + 1), step, rival, reason)
    best = min(costs, key=costs.__getitem__)
    if costs[best] < FIRST_SWITCH_COST_RATIO * costs[state.sync]:
        told = f"the best that was tried: {about(tried[best], 's')} a step"
        state = replace(state, sync=best, since=step, reason=told)
    return _rest(state, step)


def _name(sync: str) -> str:
    """Without its settings, which change little."""
    return sync.partition(" @")[0]


def _try(state: AutoState, step: int, candidate: CandidatePlan, reason: str) -> AutoState:
    due = step + candidate.settling + candidate.timed
    return replace(state, sync=candidate.sync, since=step, due=due, reason=reason)


def _rest(state: AutoState, step: int) -> AutoState:
    """Until it drifts, and for some steps even then."""
    stayed = state.sync == state.came_from
    longer = state.advices > 1 and (stayed or state.soon)
    pause = min(2 * state.cooldown, MAX_ADVICE_COOLDOWN_STEPS) if longer else ADVICE_COOLDOWN_STEPS
    return replace(state, due=None, cooldown=pause, cooldown_until=step + pause, came_from="")


def median_step_seconds(seconds: Sequence[float], cycle: int = 1) -> float:
    """The middle one of whole cycles' means, so that a pause now and then doesn't count."""
    blocks = [seconds[i : i + cycle] for i in range(len(seconds) % cycle, len(seconds), cycle)]
    return median(fmean(block) for block in blocks) if blocks else fmean(seconds)


class StepTimeDrift:
    """Whether steps take another time than they did when they were measured."""

    def __init__(self, seconds: float, cycle: int = 1) -> None:
        self._before = seconds
        self._cycle = cycle
        self._last: deque[float] = deque(maxlen=-(-STEP_TIME_WINDOW_STEPS // cycle) * cycle)
        self._in_a_row = 0

    @property
    def now(self) -> float:
        """What a step takes now."""
        return median_step_seconds([*self._last], self._cycle) if self._last else self._before

    def begin_again(self) -> None:
        """Something was done about it: look whether that helps."""
        self._last.clear()
        self._in_a_row = 0

    def add(self, seconds: float) -> bool:
        self._last.append(seconds)
        if len(self._last) < (self._last.maxlen or 0):
            return False
        ratio = self.now / self._before
        self._in_a_row = (
            self._in_a_row + 1
            if not 1 / STEP_TIME_DRIFT_FACTOR < ratio < STEP_TIME_DRIFT_FACTOR
            else 0
        )
        return self._in_a_row >= STEP_TIME_DRIFT_STEPS

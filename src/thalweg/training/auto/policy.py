"""The decisions of `auto`: which plan runs next. All ranks with the same inputs decide the same.

    advised   switch to the best plan, unless the current one is predicted to be as good
    measured  a few steps later its step time is known. If another plan was predicted to be faster,
              that one is tried, and in the end the best measured plan stays
    drifting  once the step time is far from the measured one, advice is requested again

The plan doesn't flap. A change must promise more than noise; and after an advice a cooldown passes
before the next, twice as long if the plan has stayed, or if advice is requested again soon after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from thalweg.facts import about
from thalweg.predict import Outcome

# A change must be predicted to cost less than these fractions of the current plan:
FIRST_SWITCH_COST_RATIO = 0.98  # of its prediction, at first
SWITCH_COST_RATIO = 0.95  # of its measurement, later
RIVAL_COST_FACTOR = 1.03  # times a rival's predicted cost, before that one is tried
MAX_PLAN_TRIALS = 3  # after an advice
ADVICE_COOLDOWN_STEPS, MAX_ADVICE_COOLDOWN_STEPS = 30, 4000  # steps from one advice to the next
SOON_ADVICE_COOLDOWN_FACTOR = 4  # times the cooldown
STEP_TIME_WINDOW_STEPS = 8  # at least, for a median
STEP_TIME_DRIFT_FACTOR = 1.25  # times slower or faster than measured
STEP_TIME_DRIFT_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePlan(Outcome):
    """A plan that can run here, with its predicted step time."""

    steps: float = 1.0  # assumed number of steps for one of an exact plan
    settling: int = 2  # warm-up steps
    timed: int = 6  # steps that are timed after those
    cycle: int = 1  # the period of its steps
    late: bool = False  # some steps wait for stragglers: the mean counts, not the median
    why: str = ""

    @property
    def cost(self) -> float:
        return self.steps * self.predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice(Outcome):
    """The outcome of a plan that runs from `step` on; `measured` is None until it is known."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoState:
    """The plan that runs, its first step, and the step at which advice or a measurement is due, if
    any."""

    sync: str
    since: int
    due: int | None
    awaits_advice: bool = False
    advices: int = 0  # so far
    ranking: Sequence[CandidatePlan] = ()  # best first; empty until the first advice
    tried: Mapping[str, float] = field(default_factory=dict)  # seconds, since the last advice
    trials: int = 0
    came_from: str = ""  # the plan that ran when advice was requested
    soon: bool = False  # requested soon after the last advice
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
            predicted=candidate.predicted,
            low=candidate.low,
            high=candidate.high,
            reason=self.reason,
        )


def request_advice(state: AutoState, step: int, meanwhile: str, due: int) -> AutoState:
    """The state that waits for advice at step `due`; until then another plan may run."""
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
    """Switch to the best plan, or stay; `now` is the median step time of the current plan, which is
    in the ranking too."""
    before = state.came_from or state.sync
    first = not state.advices
    own = next((candidate for candidate in ranking if candidate.sync == before), None)
    best = ranking[0]
    seen = own is not None and not own.late  # a few steps aren't representative where some straggle
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
    return _try(state, step, own, f"no other plan is predicted to be {gain} faster")


def on_no_advice(state: AutoState, step: int, problem: str) -> AutoState:
    """Stay with the plan, as there was no advice."""
    state = replace(
        state,
        sync=state.came_from or state.sync,
        awaits_advice=False,
        advices=state.advices + 1,
        reason=problem,
    )
    return _rest(state, step)


def on_measured(
    state: AutoState, step: int, seconds: float, *, may_leave: bool = True
) -> AutoState:
    """Compare the measured step time of the current plan: stay, try another, or return to a better
    one."""
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
        reason = f"{state.sync} takes {about(seconds, 's')}, more than predicted for this plan"
        return _try(replace(state, trials=state.trials + 1), step, rival, reason)
    best = min(costs, key=costs.__getitem__)
    if costs[best] < FIRST_SWITCH_COST_RATIO * costs[state.sync]:
        reason = f"the best measured plan: {about(tried[best], 's')} per step"
        state = replace(state, sync=best, since=step, reason=reason)
    return _rest(state, step)


def _name(sync: str) -> str:
    """The name of a plan without its settings, which change little."""
    return sync.partition(" @")[0]


def _try(state: AutoState, step: int, candidate: CandidatePlan, reason: str) -> AutoState:
    return replace(
        state,
        sync=candidate.sync,
        since=step,
        due=step + candidate.settling + candidate.timed,
        reason=reason,
    )


def _rest(state: AutoState, step: int) -> AutoState:
    """Keep the plan until its step time drifts, at least for the cooldown."""
    stayed = state.sync == state.came_from
    longer = state.advices > 1 and (stayed or state.soon)
    cooldown = (
        min(2 * state.cooldown, MAX_ADVICE_COOLDOWN_STEPS) if longer else ADVICE_COOLDOWN_STEPS
    )
    return replace(state, due=None, cooldown=cooldown, cooldown_until=step + cooldown, came_from="")


def median_step_seconds(seconds: Sequence[float], cycle: int = 1) -> float:
    """The median of whole cycles' means, on which a single pause has no effect."""
    blocks = [seconds[i : i + cycle] for i in range(len(seconds) % cycle, len(seconds), cycle)]
    return median(fmean(block) for block in blocks) if blocks else fmean(seconds)


class StepTimeDrift:
    """Detects that the step time differs from the measured one."""

    def __init__(self, seconds: float, cycle: int = 1) -> None:
        self._before = seconds
        self._cycle = cycle
        self._last: deque[float] = deque(maxlen=-(-STEP_TIME_WINDOW_STEPS // cycle) * cycle)
        self._in_a_row = 0

    @property
    def now(self) -> float:
        """The median step time now."""
        return median_step_seconds([*self._last], self._cycle) if self._last else self._before

    def begin_again(self) -> None:
        """Start over, as the plan itself has reacted."""
        self._last.clear()
        self._in_a_row = 0

    def add(self, seconds: float) -> bool:
        self._last.append(seconds)
        if len(self._last) < (self._last.maxlen or 0):
            return False
        ratio = self.now / self._before
        near = 1 / STEP_TIME_DRIFT_FACTOR < ratio < STEP_TIME_DRIFT_FACTOR
        self._in_a_row = 0 if near else self._in_a_row + 1
        return self._in_a_row >= STEP_TIME_DRIFT_STEPS

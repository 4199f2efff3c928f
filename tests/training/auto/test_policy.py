"""What `auto` decides: from what is predicted and measured, nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from thalweg.training.auto.policy import (
    ADVICE_COOLDOWN_STEPS,
    MAX_ADVICE_COOLDOWN_STEPS,
    AutoState,
    CandidatePlan,
    StepTimeDrift,
    median_step_seconds,
    on_advice,
    on_measured,
    on_no_advice,
    request_advice,
)

START = AutoState(sync="ring", since=0, due=8, awaits_advice=True)


def candidate_plan(sync: str, seconds: float, steps: float = 1.0) -> CandidatePlan:
    return CandidatePlan(
        sync=sync, predicted=seconds, low=0.95 * seconds, high=1.05 * seconds, steps=steps
    )


def ranking(**seconds: float) -> list[CandidatePlan]:
    return sorted(
        (candidate_plan(k, v) for k, v in seconds.items()), key=lambda candidate: candidate.cost
    )


def first_advice(**seconds: float) -> AutoState:
    return on_advice(START, 8, ranking(**seconds), seconds["ring"])


def test_the_best_is_taken_up_and_measured_later() -> None:
    state = first_advice(tree=0.5, ps=0.8, ring=1.0)
    assert (state.sync, state.since, state.awaits_advice) == ("tree", 8, False)
    assert state.due == 8 + 2 + 6
    settled = on_measured(state, 16, 0.52)
    assert (settled.sync, settled.due) == ("tree", None)
    assert settled.cooldown_until == 16 + ADVICE_COOLDOWN_STEPS


def test_what_is_as_good_stays() -> None:
    assert first_advice(tree=0.985, ring=1.0).sync == "ring"
    assert first_advice(tree=0.975, ring=1.0).sync == "tree"


def test_steps_that_a_lossy_plan_needs_more_count() -> None:
    lossy = candidate_plan("ring+topk", 0.97, steps=1.03)
    assert on_advice(START, 8, [lossy, candidate_plan("ring", 1.0)], 1.0).sync == "ring"


def test_a_plan_that_takes_longer_than_another_was_predicted_to_is_left() -> None:
    state = first_advice(tree=0.5, ps=0.6, ring=1.0)
    stays = on_measured(state, 16, 0.6)  # less than 3 % above 0.6
    assert (stays.sync, stays.due) == ("tree", None)
    tries = on_measured(state, 16, 0.65)
    assert (tries.sync, tries.since, tries.due) == ("ps", 16, 24)
    assert on_measured(tries, 24, 0.61).sync == "ps"
    back = on_measured(tries, 24, 0.7)
    assert (back.sync, back.due) == ("tree", None)
    assert back.since == 24


def test_the_same_in_other_buckets_is_no_other() -> None:
    ranking = [
        candidate_plan("tree", 0.5),
        candidate_plan("tree @ bucket=1MB", 0.51),
        candidate_plan("ps", 0.55),
        candidate_plan("ring", 1.0),
    ]
    state = on_advice(START, 8, ranking, 1.0)
    assert on_measured(state, 16, 0.7).sync == "ps"


def test_at_most_three_are_tried() -> None:
    state = first_advice(a=0.1, b=0.2, c=0.3, d=0.4, ring=1.0)
    tried = []
    step = 8
    while state.due is not None:
        tried.append(state.sync)
        step = state.due
        state = on_measured(state, step, 2.0)
    assert tried == ["a", "b", "c"]
    assert state.sync == "ring"  # which took 1 s when it was left


def test_under_a_code_with_a_worker_gone_nothing_is_changed() -> None:
    state = first_advice(gc=0.1, b=0.2, ring=1.0)
    stays = on_measured(state, 16, 2.0, may_leave=False)
    assert (stays.sync, stays.due) == ("gc", None)


def test_a_later_change_has_to_promise_more() -> None:
    """Both against what is predicted of the plan that runs, and what it was measured to take."""
    running = on_measured(first_advice(tree=0.5, ring=1.0), 16, 0.5)
    asked = request_advice(running, 80, "tree", 80)
    assert (asked.due, asked.awaits_advice) == (80, True)
    assert on_advice(asked, 80, ranking(ps=0.92, tree=1.0, ring=2.0), 0.96).sync == "tree"
    assert on_advice(asked, 80, ranking(ps=0.90, tree=1.0, ring=2.0), 0.96).sync == "ps"
    assert on_advice(asked, 80, ranking(ps=0.90, tree=0.91, ring=2.0), 2.0).sync == "tree"


def test_asked_from_a_code_it_may_go_back_to_it() -> None:
    running = on_measured(first_advice(gc=0.5, ring=1.0), 16, 0.5)
    asked = request_advice(running, 80, "ring", 80)
    assert asked.sync == "ring"
    assert on_advice(asked, 80, ranking(gc=0.8, ring=1.0), 0.8).sync == "gc"
    assert on_no_advice(asked, 80, "no").sync == "gc"


def test_advice_that_comes_to_nothing_is_asked_for_ever_more_seldom() -> None:
    state = on_measured(first_advice(tree=0.5, ring=1.0), 16, 0.5)
    pauses = []
    for _ in range(9):
        step = state.cooldown_until
        state = on_advice(
            request_advice(state, step, "tree", step), step, ranking(tree=0.5, ring=1.0), 0.7
        )
        assert state.due is not None
        state = on_measured(state, state.due, 0.7)
        pauses.append(state.cooldown)
    assert pauses[:3] == [
        2 * ADVICE_COOLDOWN_STEPS,
        4 * ADVICE_COOLDOWN_STEPS,
        8 * ADVICE_COOLDOWN_STEPS,
    ]
    assert pauses[-1] == MAX_ADVICE_COOLDOWN_STEPS


def test_and_so_is_advice_that_is_needed_again_soon() -> None:
    state = on_measured(first_advice(tree=0.5, ring=1.0), 16, 0.5)
    pauses = []
    for fast, quiet in (("ring", 0), ("tree", 0), ("ring", 2000)):
        step = state.cooldown_until + quiet
        seconds = {"ring": 1.0, "tree": 1.0, fast: 0.5}
        state = on_advice(
            request_advice(state, step, state.sync, step), step, ranking(**seconds), 1.0
        )
        assert state.due is not None
        state = on_measured(state, state.due, 0.5)
        assert state.sync == fast
        pauses.append(state.cooldown)
    assert pauses == [2 * ADVICE_COOLDOWN_STEPS, 4 * ADVICE_COOLDOWN_STEPS, ADVICE_COOLDOWN_STEPS]


def test_where_some_are_late_a_few_steps_of_the_first_plan_tell_little() -> None:
    late = [replace(candidate, late=True) for candidate in ranking(gc=0.5, ring=1.0)]
    state = on_advice(START, 8, late, 0.3)
    assert on_measured(state, 40, 0.6).sync == "gc"


def test_what_is_usual() -> None:
    assert median_step_seconds([1.0, 1.2, 9.0]) == 1.2
    assert median_step_seconds([1.0, 3.0, 1.0, 3.0, 9.0, 3.0], cycle=2) == 2.0
    assert median_step_seconds([9.0, 1.0, 3.0], cycle=2) == 2.0  # the newest whole cycles
    assert median_step_seconds([4.0, 2.0], cycle=3) == 3.0


@pytest.mark.parametrize(
    ("factor", "drifts"), [(1.2, False), (1.3, True), (0.85, False), (0.7, True)]
)
def test_drift(factor: float, drifts: bool) -> None:
    drift = StepTimeDrift(1.0)
    results = [drift.add(factor) for _ in range(40)]
    assert any(results) is drifts
    if drifts:
        assert results.index(True) == 8 + 8 - 2  # eight steps to look at, eight times in a row
        assert drift.now == factor


def test_a_pause_now_and_then_is_no_drift() -> None:
    drift = StepTimeDrift(1.0)
    assert not any(drift.add(5.0 if step % 4 == 0 else 1.0) for step in range(200))


class Ride:
    """A thousand steps under what `seconds` says of step and plan, times noise; advice foretells
    the same with an error of its own."""

    def __init__(self, seconds: Callable[[int, str], float], noise: float, error: float) -> None:
        self.switches: list[int] = []
        self.advices: list[int] = []
        self._seconds = seconds
        self._noise = noise
        self._error = error

    def run(self, seed: int, steps: int = 1000) -> str:
        draw = random.Random(seed)
        state, drift, timed = START, None, list[float]()
        for step in range(steps):
            before = state.sync
            if state.due == step:
                skipped = 2
                now = median_step_seconds(timed[skipped:])
                if state.awaits_advice:
                    state = on_advice(state, step, self._ranking(draw, step), now)
                    self.advices.append(step)
                else:
                    state = on_measured(state, step, now)
                timed = []
                drift = StepTimeDrift(state.tried[state.sync]) if state.due is None else None
            if state.sync != before:
                self.switches.append(step)
            took = self._seconds(step, state.sync) * draw.lognormvariate(0, self._noise)
            if state.due is not None:
                timed.append(took)
            elif drift is not None and drift.add(took) and step + 1 >= state.cooldown_until:
                state = request_advice(state, step + 1, state.sync, step + 1)
                timed = [drift.now] * 3
        return state.sync

    def _ranking(self, draw: random.Random, step: int) -> list[CandidatePlan]:
        return ranking(
            **{
                sync: self._seconds(step, sync) * draw.lognormvariate(0, self._error)
                for sync in ("ring", "tree", "ps", "double_tree")
            }
        )


STEADY = {"ring": 1.0, "tree": 0.62, "ps": 0.6, "double_tree": 0.64}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("noise", "switches", "advices"), [(0.1, 1, 2), (0.2, 3, 4)])
def test_it_never_flaps(seed: int, noise: float, switches: int, advices: int) -> None:
    """Where nothing changes but for the noise of each step, and predictions are 10 % off: after the
    first advice and its trials."""
    ride = Ride(lambda step, sync: STEADY[sync], noise=noise, error=0.1)
    assert ride.run(seed) != "ring"
    assert len([step for step in ride.switches if step > 40]) <= switches
    assert len(ride.advices) <= advices


@pytest.mark.parametrize("seed", range(10))
def test_it_follows_a_change_that_stays(seed: int) -> None:
    def seconds(step: int, sync: str) -> float:
        return STEADY[sync] * (3.0 if sync != "tree" and step >= 400 else 1.0)

    ride = Ride(seconds, noise=0.1, error=0.05)
    assert ride.run(seed) == "tree"
    assert len([step for step in ride.switches if step > 60]) <= 2


@pytest.mark.parametrize("seed", range(10))
def test_it_does_not_chase_a_network_that_comes_and_goes(seed: int) -> None:
    """Every 50 steps another plan is the best: twenty changes would be chasing."""

    def seconds(step: int, sync: str) -> float:
        return 1.0 if (sync == "tree") == (step // 50 % 2 == 0) else 2.0

    ride = Ride(seconds, noise=0.1, error=0.05)
    ride.run(seed)
    assert len(ride.switches) <= 10
    assert len(ride.advices) <= 6

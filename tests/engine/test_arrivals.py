from __future__ import annotations

import pytest

from thalweg.engine import arrivals
from thalweg.engine.arrivals import WATCHED_FINISHED_STEPS, StepDeadlines


def test_deadlines_follow_the_pace() -> None:
    own = StepDeadlines()
    assert own.deadline == arrivals.FIRST_DEADLINE_SECONDS
    for step in range(100):
        own.seen(step, 10.0 * step)
        own.seen(step, 10.0 * step + 5)  # the first counts
        assert own.first_seen(step) == 10.0 * step
        own.finish_step(step, 10.0 * step + (2.0 if step % 10 else 4.0))
    assert own.deadline == pytest.approx(arrivals.DEADLINE_P95_FACTOR * 4.0)
    for step in range(100, 300):
        own.seen(step, step)
        own.finish_step(step, step + 0.001)
    assert own.deadline == arrivals.MIN_DEADLINE_SECONDS
    assert own.first_seen(299) is None
    own.seen(300, 0.0)
    own.finish_step(300, 1000.0, usual=False)
    assert own.deadline == arrivals.MIN_DEADLINE_SECONDS


def test_arrivals_are_recorded_stragglers_included() -> None:
    own = StepDeadlines()
    own.ready(0, 1, 1.0)
    own.seen(0, 1.5, peer=3)
    own.seen(0, 1.7, peer=3)  # a second piece
    own.finish_step(0, 2.0)
    own.seen(0, 9.0, peer=4)  # nobody waited for it
    assert not list(own.arrivals)
    for step in range(1, WATCHED_FINISHED_STEPS + 1):
        own.finish_step(step, 10.0)
    [arrival] = own.arrivals
    assert (arrival.step, arrival.bucket, arrival.ready, arrival.ended) == (0, 1, 1.0, 2.0)
    assert arrival.peers == {3: 1.5, 4: 9.0}


def test_what_is_too_late_is_not_noted() -> None:
    own = StepDeadlines()
    own.finish_step(100, 1.0)
    own.seen(3, 2.0, peer=1)
    own.ready(3, 0, 2.0)
    assert own.first_seen(3) is None
    own.finish_step(200, 3.0)
    assert not list(own.arrivals)

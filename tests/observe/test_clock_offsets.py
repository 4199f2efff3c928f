"""What the run's clock showed, from what a rank knew of it now and then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.observe.records import ClockSample
from thalweg.observe.timeline import MAX_CLOCK_DRIFT_RATIO, ClockOffsets


def moment(at: float, offset: float, error: float = 0.0) -> ClockSample:
    return ClockSample(at=at, offset=offset, error=error)


def test_straight_between_two_moments_and_constant_outside() -> None:
    clock = ClockOffsets.of([moment(200, 5.02), moment(100, 5.0)])
    assert [clock(at) for at in (0, 100, 150, 200, 900)] == pytest.approx(
        [5.0, 105.0, 155.01, 205.02, 905.02]
    )


def test_of_two_at_the_same_moment_the_later_counts() -> None:
    """A file that is begun anew repeats the last one."""
    assert ClockOffsets.of([moment(1, 5), moment(1, 6)])(2) == 8


def test_a_clock_that_was_set_is_not_smoothed() -> None:
    clock = ClockOffsets.of([moment(100, 5.0), moment(200, 65.0)])
    assert clock(199.9) == pytest.approx(204.9)
    assert clock(200) == pytest.approx(265)


def test_errors_may_look_like_drift() -> None:
    clock = ClockOffsets.of([moment(100, 5.0, 0.3), moment(101, 5.5, 0.3)])
    assert clock(100.5) == pytest.approx(105.75)
    assert clock.error == 0.3


@given(
    st.lists(
        st.tuples(st.floats(0.001, 100), st.floats(-MAX_CLOCK_DRIFT_RATIO, MAX_CLOCK_DRIFT_RATIO)),
        max_size=8,
    ),
    st.lists(st.floats(-100, 1000), min_size=2, max_size=20),
)
def test_later_stays_later(drifts: list[tuple[float, float]], moments: list[float]) -> None:
    known = [moment(0, 3.0)]
    for passed, drift in drifts:
        last = known[-1]
        known.append(moment(last.at + passed, last.offset + drift * passed))
    clock = ClockOffsets.of(known)
    shown = [clock(at) for at in sorted(moments)]
    assert shown == sorted(shown)

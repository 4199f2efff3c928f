from __future__ import annotations

from typing import Any

import pytest

from thalweg.facts import Cluster
from thalweg.members import activity
from thalweg.members.activity import (
    LONG_PHASE_STEP_FACTOR,
    MIN_LONG_PHASE_SECONDS,
    WAITING_PHASE,
    HangDetector,
)

LONG = MIN_LONG_PHASE_SECONDS + 1


def said(number: int, phase: str, lasts: float, step: int = 5, usual: float = 0.1) -> Any:
    activity = {"phase": phase, "step": step, "lasts": lasts, "where": "train.py:9 (load)"}
    return {"number": number, "activity": activity, "steps": [[step, usual]]}


def test_who_does_not_wait_is_named_once() -> None:
    found = HangDetector(Cluster.flat(3))
    reports = {
        0: said(1, WAITING_PHASE, LONG),
        1: said(1, "forward", LONG),
        2: said(1, WAITING_PHASE, LONG),
    }
    [line] = found.find_hung(reports)
    assert line.startswith("rank 1 on host1 blocks the other ranks (11 s): in for")
    assert "step 5" in line
    assert "train.py:9 (load)" in line
    assert found.find_hung(reports) == []


def test_the_next_step_is_another_matter() -> None:
    found = HangDetector(Cluster.flat(2))
    for step in (5, 6):
        reports = {0: said(step, WAITING_PHASE, LONG, step), 1: said(step, "forward", LONG, step)}
        assert len(found.find_hung(reports)) == 1


@pytest.mark.parametrize("lasts", [0.0, MIN_LONG_PHASE_SECONDS - 1])
def test_nobody_while_they_have_not_waited_long(lasts: float) -> None:
    assert (
        HangDetector(Cluster.flat(2)).find_hung(
            {0: said(1, WAITING_PHASE, lasts), 1: said(1, "x", 99.0)}
        )
        == []
    )


def test_nobody_where_steps_take_long_anyway() -> None:
    found = HangDetector(Cluster.flat(2))
    usual = 10.0
    reports = {
        0: said(1, WAITING_PHASE, 50.0, usual=usual),
        1: said(1, "forward", 50.0, usual=usual),
    }
    assert found.find_hung(reports) == []
    assert found.hang_seconds == LONG_PHASE_STEP_FACTOR * usual


def test_nobody_where_nobody_waits() -> None:
    assert (
        HangDetector(Cluster.flat(2)).find_hung({0: said(1, "x", 99.0), 1: said(1, "y", 99.0)})
        == []
    )


@pytest.mark.parametrize(("step", "lasts"), [(6, 0.1), (6, LONG), (5, 0.1)])
def test_who_has_gone_on_meanwhile_is_not_the_cause(step: int, lasts: float) -> None:
    """What the others reported last may be older."""
    found = HangDetector(Cluster.flat(2))
    assert (
        found.find_hung({0: said(1, WAITING_PHASE, LONG), 1: said(1, "forward", lasts, step)}) == []
    )


def test_who_says_nothing_any_more_is_named_though_it_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(activity, "monotonic", lambda: now)
    found = HangDetector(Cluster.flat(2))
    assert found.find_hung({0: said(1, WAITING_PHASE, 1.0), 1: said(1, WAITING_PHASE, 1.0)}) == []
    now += LONG
    [line] = found.find_hung({0: said(2, WAITING_PHASE, LONG), 1: said(1, WAITING_PHASE, 1.0)})
    assert "rank 1 on host1" in line
    assert "silent for 11 s, last seen in waiting" in line

from __future__ import annotations

from typing import Any

import pytest

from thalweg.facts import Cluster
from thalweg.members import activity
from thalweg.members.activity import SHORTEST, TIMES_A_STEP, WAITING, Hangs

LONG = SHORTEST + 1


def said(number: int, phase: str, lasts: float, step: int = 5, usual: float = 0.1) -> Any:
    activity = {"phase": phase, "step": step, "lasts": lasts, "where": "train.py:9 (load)"}
    return {"number": number, "activity": activity, "steps": [[step, usual]]}


def test_who_does_not_wait_is_named_once() -> None:
    found = Hangs(Cluster.flat(3))
    heard = {0: said(1, WAITING, LONG), 1: said(1, "forward", LONG), 2: said(1, WAITING, LONG)}
    [line] = found.look(heard)
    assert line.startswith("rank 1 on host1 holds up the others, who wait for 11 s: it is in for")
    assert "step 5" in line
    assert "train.py:9 (load)" in line
    assert found.look(heard) == []


def test_the_next_step_is_another_matter() -> None:
    found = Hangs(Cluster.flat(2))
    for step in (5, 6):
        heard = {0: said(step, WAITING, LONG, step), 1: said(step, "forward", LONG, step)}
        assert len(found.look(heard)) == 1


@pytest.mark.parametrize("lasts", [0.0, SHORTEST - 1])
def test_nobody_while_they_have_not_waited_long(lasts: float) -> None:
    assert Hangs(Cluster.flat(2)).look({0: said(1, WAITING, lasts), 1: said(1, "x", 99.0)}) == []


def test_nobody_where_steps_take_long_anyway() -> None:
    found = Hangs(Cluster.flat(2))
    usual = 10.0
    heard = {0: said(1, WAITING, 50.0, usual=usual), 1: said(1, "forward", 50.0, usual=usual)}
    assert found.look(heard) == []
    assert found.long == TIMES_A_STEP * usual


def test_nobody_where_nobody_waits() -> None:
    assert Hangs(Cluster.flat(2)).look({0: said(1, "x", 99.0), 1: said(1, "y", 99.0)}) == []


@pytest.mark.parametrize(("step", "lasts"), [(6, 0.1), (6, LONG), (5, 0.1)])
def test_who_has_gone_on_meanwhile_is_not_the_cause(step: int, lasts: float) -> None:
    """What the others told last may be older."""
    found = Hangs(Cluster.flat(2))
    assert found.look({0: said(1, WAITING, LONG), 1: said(1, "forward", lasts, step)}) == []


def test_who_says_nothing_any_more_is_named_though_it_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(activity, "monotonic", lambda: now)
    found = Hangs(Cluster.flat(2))
    assert found.look({0: said(1, WAITING, 1.0), 1: said(1, WAITING, 1.0)}) == []
    now += LONG
    [line] = found.look({0: said(2, WAITING, LONG), 1: said(1, WAITING, 1.0)})
    assert "rank 1 on host1" in line
    assert "silent for 11 s, last seen in waiting" in line

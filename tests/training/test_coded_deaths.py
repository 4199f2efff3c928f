"""Workers that die under a code: within its tolerance nobody notices, beyond it the plan says."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import nn

from tests.training.coded import (
    SIZE,
    STEPS,
    STEPS_A_EPOCH,
    TREE,
    Board,
    Script,
    all_of,
    dies,
    train_among_the_dying,
    train_together,
    waits,
)
from tests.training.workers import one_value, same_bits
from thalweg.engine import arrivals, tree_node, tree_relay
from thalweg.training import Run

ALL = list(range(1, STEPS + 1))
TEAMS = "gc(stragglers=1)"
"""On 4 workers: rank 0, the root, and 1 compute the same, as do 2 and 3."""
BOTH = all_of(dies(2, at=5), dies(3, at=5))


@pytest.fixture(scope="module")
def calm() -> list[dict[str, Any]]:
    """The run in which nothing happens."""
    return train_together(Script(sync=TREE))[0]


@pytest.fixture(scope="module")
def calm_teams() -> list[dict[str, Any]]:
    return train_together(Script(sync=TEAMS), size=4)[0]


def assert_as_if_nothing_had_happened(
    told: list[dict[str, Any]], calm: list[dict[str, Any]]
) -> None:
    """But for the order in which another tree adds up, and for a rank that was behind when its
    tree ended: it takes over the state of another, and not the steps before that."""
    assert [step for step in ALL if all(step not in one["steps"] for one in told)] == []
    for one in told:
        assert one["steps"] == ALL or one["taken_over"] > 0
        assert one["steps"] == sorted(set(one["steps"]))
    assert same_bits(told)
    assert told[0]["values"] == pytest.approx(calm[0]["values"], rel=1e-9)
    assert told[0]["lr"] == calm[0]["lr"]


@pytest.mark.parametrize(
    "dead",
    [(4,), (2,), (2, 3, 4), (3, 6, 4), (5, 6, 2)],
    ids=["a leaf", "one with others below", "both", "some of every team", "a whole branch"],
)
def test_within_the_tolerance_no_step_is_lost(
    dead: tuple[int, ...], calm: list[dict[str, Any]]
) -> None:
    act = all_of(*(dies(rank, at=4 + 3 * number) for number, rank in enumerate(dead)))
    ended = train_among_the_dying(Script(sync=TREE, act=act))
    assert ended.lost == sorted(dead)
    assert one_value(ended.told, "steps") == ALL
    assert same_bits(ended.told + calm)
    for rank in dead:
        assert (
            rank,
            f"rank {rank} was killed by SIGKILL (out of memory?); the others continue",
        ) in ended.said


@pytest.mark.parametrize("rank", [2, 5, 3])
def test_one_that_is_started_again_comes_back(
    rank: int, calm: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is had from one of those who wait for the first layer; that itself stands still."""
    monkeypatch.setattr(tree_relay, "STATE_REQUEST_RETRY_SECONDS", 0.1)
    act = all_of(dies(rank, at=5), waits(1, 2, at=12, until_back=rank))
    ended = train_among_the_dying(Script(sync=TREE, act=act), restart=[rank])
    assert not ended.lost
    assert same_bits(ended.told + calm)
    assert one_value(ended.told, "lr") == calm[0]["lr"]
    again = ended.by_rank.pop(rank)["steps"]
    assert one_value(ended.told, "steps") == ALL
    assert 5 < again[0] <= 13
    assert again == ALL[again[0] - 1 :]


def test_one_that_comes_back_is_of_use(
    calm_teams: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replica dies when it is there again, and there is no other."""
    monkeypatch.setattr(tree_relay, "STATE_REQUEST_RETRY_SECONDS", 0.1)
    act = all_of(dies(2, at=3), waits(0, 1, at=8, until_back=2), dies(3, at=14))
    ended = train_among_the_dying(Script(sync=TEAMS, act=act), size=4, restart=[2])
    assert ended.lost == [3]
    assert same_bits(ended.told + calm_teams)


def test_an_error_in_one_script_is_told_and_the_others_go_on(
    calm_teams: list[dict[str, Any]],
) -> None:
    def fails(run: Run, board: Board) -> None:
        if (run.rank, run.step) == (3, 6):
            raise ValueError("boom")

    ended = train_among_the_dying(Script(sync=TEAMS, act=fails), size=4)
    assert ended.lost == [3]
    assert one_value(ended.told, "steps") == ALL
    assert same_bits(ended.told + calm_teams)
    [(rank, line)] = ended.said
    assert rank == 3
    assert line.startswith("rank 3: ValueError: boom (")
    assert line.endswith("; the others continue")


# Beyond the tolerance


def test_the_others_go_on_in_a_smaller_tree(calm_teams: list[dict[str, Any]]) -> None:
    ended = train_among_the_dying(Script(sync=TEAMS, act=BOTH), size=4)
    assert ended.lost == [2, 3]
    assert_as_if_nothing_had_happened(ended.told, calm_teams)


def test_or_give_up_and_say_for_whom_they_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MIN_DEADLINE_SECONDS", 0.3)
    ended = train_among_the_dying(Script(sync="gc(stragglers=1, beyond=raise)", act=BOTH), size=4)
    assert ended.failure is not None
    assert ended.failure.exit_code == 1
    problem = ended.failure.problem
    assert problem.startswith("rank 0: step 5 takes longer than ")
    assert problem.endswith(
        "the root waits for ranks 2, 3, more stragglers than the code tolerates"
    )
    assert {rank for rank, _ in ended.said} <= {2, 3}


def test_or_go_on_with_what_there_is_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MIN_DEADLINE_SECONDS", 0.1)
    monkeypatch.setattr(tree_relay, "PARTIAL_RESULT_GRACE_SECONDS", 0.05)
    script = Script(sync="gc(stragglers=1, beyond=partial)", act=BOTH, epochs=2)
    ended = train_among_the_dying(script, size=4)
    assert ended.lost == [2, 3]
    assert same_bits(ended.told)
    approximate = one_value(ended.told, "approximate")
    assert {int(step) for step in approximate} >= set(range(5, 2 * STEPS_A_EPOCH))
    assert set(approximate.values()) == {0.5}


# The root


def test_without_its_root_the_others_plant_another_tree(calm: list[dict[str, Any]]) -> None:
    ended = train_among_the_dying(Script(sync=TREE, act=dies(0, at=5)), spare=range(SIZE))
    assert ended.lost == [0]
    assert_as_if_nothing_had_happened(ended.told, calm)


def test_a_run_that_is_gone_goes_on_from_its_checkpoint(
    tmp_path: Path, calm: list[dict[str, Any]]
) -> None:
    at = 2 * STEPS_A_EPOCH + 2
    act = all_of(*(dies(rank, at=at) for rank in range(SIZE)))
    ended = train_among_the_dying(
        Script(sync=TREE, checkpoint=tmp_path, act=act, timeout="5s"), spare=range(SIZE)
    )
    assert ended.failure is not None
    assert len(ended.said) == SIZE
    (resumed,) = train_together(Script(sync=TREE, checkpoint=tmp_path))
    assert one_value(resumed, "steps") == ALL[2 * STEPS_A_EPOCH :]
    assert same_bits(resumed + calm)
    assert one_value(resumed, "lr") == calm[0]["lr"]


# A process that stands still altogether


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20_000), nn.Tanh(), nn.Linear(20_000, 3))  # 1.6 MB in float64


@pytest.mark.parametrize("until", [pytest.param(25, marks=pytest.mark.slow), 40])
def test_one_that_is_stopped_is_not_kept_in_memory(
    until: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it goes on only when the others are through: what it lost it asks for again."""
    monkeypatch.setattr(tree_node, "MAX_RESULT_HISTORY_STEPS", 3)
    held: list[int] = []  # bytes, by its parent

    def act(run: Run, board: Board) -> None:
        if (run.rank, run.step) == (3, 3):
            os.kill(os.getpid(), signal.SIGSTOP)
        if run.rank == 0 and run.step >= 10:
            held.append(psutil.Process().memory_info().rss)
            assert held[-1] - held[0] < 24 << 20  # and all results together are 64 MB

    ended = train_among_the_dying(
        Script(sync=TEAMS, act=act, make=large, epochs=40 // STEPS_A_EPOCH),
        size=4,
        resume=[3],
        when=lambda board: board.furthest(but=3) >= until,
    )
    assert not ended.lost
    assert same_bits(ended.told)
    assert len(ended.by_rank[3]["steps"]) < 40

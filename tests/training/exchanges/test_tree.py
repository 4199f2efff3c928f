"""Training under a gradient code: as without one, whoever is late."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.training.coded import (
    EPOCHS,
    SIZE,
    STEPS,
    STEPS_A_EPOCH,
    TREE,
    Board,
    Script,
    all_of,
    boards,
    by_script,
    in_turn,
    late,
    train_together,
    trained,
)
from tests.training.conftest import InOneCrew
from tests.training.workers import one_value, raised, same_bits
from thalweg.engine import tree_node
from thalweg.training import Run

SOME_LATE = all_of(
    late(6, at=2, until=6),
    late(1, at=7, until=10),
    late(3, at=8, until=17),
    late(2, at=12, until=15),
)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def far(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """The largest difference of a parameter."""
    pairs = zip(one[0]["values"], other[0]["values"], strict=True)
    return max(abs(a - b) for a, b in pairs)


@cache
def ring_of(dtype: torch.dtype) -> dict[str, Any]:
    """The training without a code, once in a process."""
    return trained(Script(sync="ring", dtype=dtype), Board())


@pytest.fixture(scope="module")
def calm() -> list[dict[str, Any]]:
    """The run in which nothing happens."""
    return train_together(Script(sync=TREE))[0]


@pytest.mark.parametrize(
    "sync",
    [
        TREE,
        "codedreduce(fanout=2, stragglers=1, root=separate)",
        "codedreduce(fanout=3, stragglers=1, code=cyclic)",
        slow("codedreduce(fanout=2, stragglers=1, code=cyclic_mds, root=separate)"),
        slow("gc(stragglers=2)"),
        slow("gc(stragglers=2, code=cyclic)"),
        "gc(stragglers=2, code=cyclic_mds)",
    ],
)
def test_it_trains_as_without_a_code_whoever_is_late(sync: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, sync: str, boards: list[Board]) -> dict[str, Any]:
        coded = in_turn([Script(sync=sync), Script(sync=sync, act=SOME_LATE)], boards)
        return {"results": [*coded["results"], ring_of(torch.float64)]}

    calm, troubled, ring = by_script(in_one_crew(SIZE, work, boards=boards))
    for results in (calm, troubled, ring):
        assert same_bits(results)
        assert one_value(results, "steps") == list(range(1, STEPS + 1))
    assert far(calm, ring) < 1e-12
    assert far(troubled, ring) < 1e-12
    if "cyclic" not in sync:  # there the late change by what others are multiplied
        assert same_bits(calm + troubled)
    for rank in (3, 6):
        assert troubled[rank]["gone_through"]


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        {"clip": 0.05},
        {"frozen": True},
        {"sync": f"{TREE} @ bucket=100B"},
        {"loader": {"num_workers": 1}},
    ],
    ids=["accumulation", "clipping", "a frozen layer", "several buckets", "a loader of its own"],
)
def test_ways_of_training(options: dict[str, Any], in_one_crew: InOneCrew) -> None:
    def work(rank: int, options: dict[str, Any], boards: list[Board]) -> dict[str, Any]:
        script: dict[str, Any] = {"sync": TREE, "epochs": 2, **options}
        scripts = [
            Script(**script),
            Script(**script, act=all_of(late(6, at=1, until=4), late(1, at=2, until=4))),
            Script(**{**script, "sync": "ring"}),
        ]
        return in_turn(scripts, boards)

    calm, troubled, ring = by_script(in_one_crew(SIZE, work, boards=boards))
    assert same_bits(calm + troubled)
    assert far(calm, ring) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str
)
def test_narrower_parameters(dtype: torch.dtype, tolerance: float, in_one_crew: InOneCrew) -> None:
    def work(rank: int, dtype: torch.dtype, boards: list[Board]) -> dict[str, Any]:
        scripts = [
            Script(sync=TREE, dtype=dtype),
            Script(sync=TREE, dtype=dtype, act=SOME_LATE),
            Script(sync="ring", dtype=dtype),
        ]
        return in_turn(scripts, boards)

    calm, troubled, ring = by_script(in_one_crew(SIZE, work, boards=boards))
    assert same_bits(calm + troubled)
    assert far(calm, ring) < tolerance


# One that is late


@pytest.mark.parametrize("who", [0, 1, 4])
def test_one_who_is_late_catches_up_by_what_waits_for_it(
    who: int, calm: list[dict[str, Any]], in_one_crew: InOneCrew
) -> None:
    """The root's own worker, one in the first layer, a leaf."""

    def work(rank: int, who: int, boards: list[Board]) -> dict[str, Any]:
        return in_turn([Script(sync=TREE, act=late(who, at=3, until=15))], boards)

    (troubled,) = by_script(in_one_crew(SIZE, work, boards=boards))
    assert same_bits(calm + troubled)
    assert one_value(troubled, "steps") == list(range(1, STEPS + 1))
    assert set(range(4, 15)) <= set(troubled[who]["gone_through"])
    assert one_value(troubled, "taken_over") == 0


@pytest.mark.parametrize(
    ("who", "at", "until"),
    [
        (4, 1, 4),  # in the same epoch
        slow(0, 1, 4),
        (1, 3, 2 * STEPS_A_EPOCH + 1),  # over the end of an epoch, and of another
        slow(2, STEPS_A_EPOCH - 1, STEPS_A_EPOCH + 4),
        slow(3, STEPS - 7, STEPS),  # to the very end
        (0, STEPS - 7, STEPS),
        (5, STEPS_A_EPOCH, STEPS),
    ],
)
def test_one_left_behind_takes_over_a_state(
    who: int, at: int, until: int, calm: list[dict[str, Any]], in_one_crew: InOneCrew
) -> None:
    def work(rank: int, who: int, at: int, until: int, boards: list[Board]) -> dict[str, Any]:
        with patch.object(tree_node, "MAX_RESULT_HISTORY_STEPS", 2):
            return in_turn([Script(sync=TREE, act=late(who, at=at, until=until))], boards)

    (troubled,) = by_script(in_one_crew(SIZE, work, boards=boards))
    assert same_bits(calm + troubled)
    assert one_value(troubled, "lr") == one_value(calm, "lr")
    assert one_value(troubled, "epoch") == EPOCHS
    assert troubled[who]["taken_over"] >= 1


# Changes of plan


@pytest.mark.parametrize("kept", [64, 2])
@pytest.mark.parametrize("who", [0, 3])
def test_into_a_code_and_out_again_with_one_who_is_late(
    kept: int, who: int, in_one_crew: InOneCrew
) -> None:
    """It is late once in between, and once when the others have left."""

    @cache
    def ring() -> dict[str, Any]:
        return trained(Script(sync="ring", epochs=8), Board())

    def work(rank: int, kept: int, who: int, folder: Path, boards: list[Board]) -> dict[str, Any]:
        def proposes(run: Run, board: Board) -> None:
            if run.rank == 4 and run.step == 1:
                run.switch(TREE)
            if run.step >= 17:
                with suppress(FileExistsError):  # the first who is there
                    (folder / "proposed").touch(exist_ok=False)
                    run.switch("ring")

        act = all_of(proposes, late(who, at=10, until=15), late(who, at=20, until=24))
        with patch.object(tree_node, "MAX_RESULT_HISTORY_STEPS", kept):
            changed = in_turn([Script(sync="ring", act=act, epochs=8)], boards)
        return {"results": [*changed["results"], ring()]}

    changed, ring_alone = by_script(in_one_crew(SIZE, work, boards=boards))
    assert same_bits(changed)
    assert far(changed, ring_alone) < 1e-12
    plans: dict[str, str] = {}
    for result in changed:
        assert all(plans.setdefault(step, plan) == plan for step, plan in result["plans"].items())
    course = [(plan, len(list(steps))) for plan, steps in groupby(plans[str(i)] for i in range(40))]
    assert course in (
        [("ring", 8), (TREE, 16), ("ring", 16)],
        [("ring", 8), (TREE, 24), ("ring", 8)],  # if the one who proposed it took so long
    )
    assert one_value(changed, "lr") == one_value(ring_alone, "lr")


# What can't be


@pytest.mark.parametrize(
    ("sync", "said"),
    [
        ("gc(stragglers=4)", "4 workers can't do without 4; use stragglers=3 or less, or 5 wor"),
        ("codedreduce(fanout=2, stragglers=2)", "a parent of 2 can't do without 2 of them; use"),
        ("gc(code=cyclic, stragglers=2, beyond=partial)", "gc(code=cyclic, stragglers=2, beyond="),
        ("gc+int8", "gc+int8 is unsound: a code adds weighted messages"),
    ],
)
def test_plans_that_are_refused_on_all_ranks(sync: str, said: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, sync: str) -> dict[str, Any]:
        return raised(lambda: trained(Script(sync=sync), Board(4)))

    results = in_one_crew(4, work)
    assert one_value(results, "kind") in ("PlanError", "LayoutError", "UnsoundPlan")
    assert one_value(results, "text").startswith(said)
    assert "; " in results[0]["text"]
    assert "\n" not in results[0]["text"]

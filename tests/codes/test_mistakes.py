"""What can't be done is said in a line, with what to do instead."""

from __future__ import annotations

import pytest

from tests.codes.trees import planted
from thalweg import Cluster, Group, parse_plan
from thalweg.codes.tree import even_children
from thalweg.errors import LayoutError, PlanError, UsageError
from thalweg.redundancy import allocation_of


@pytest.mark.parametrize(
    ("text", "workers", "message"),
    [
        (
            "gc(stragglers=4)",
            4,
            "4 workers can't do without 4; use stragglers=3 or less, or 5 workers or more",
        ),
        ("gc", 1, "1 worker can't do without 1; use more workers"),
        (
            "codedreduce(fanout=4, stragglers=4)",
            20,
            "a parent of 4 can't do without 4 of them; use stragglers=3 or less, or a larger "
            "fanout",
        ),
        (
            "codedreduce(fanout=4, stragglers=3)",
            3,
            "3 workers can't do without 3; use stragglers=2 or less, or 4 workers or more",
        ),
        (
            "gc(stragglers=2, code=cyclic_mds)",
            4,
            "a real cyclic_mds code of 4 can't do without 2: their difference must be odd; use "
            "stragglers=1, code=fractional or code=cyclic",
        ),
        (
            "gc(stragglers=1, root=separate)",
            1,
            "gc(stragglers=1, root=separate) has a root and no workers; use more workers",
        ),
        ("ring", 4, "ring has no code; try codedreduce or gc"),
        ("asp", 4, "asp has no code; try codedreduce or gc"),
        ("lgc(k=5)", 4, "k=5 is more than the 4 workers; use k=4 or less"),
    ],
)
def test_what_does_not_fit(text: str, workers: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        allocation_of(parse_plan(text), Group.everybody(Cluster.flat(workers)))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gc(stragglers=-1)", "stragglers of gc: -1 is too small; give at least 0"),
        ("codedreduce(fanout=1)", "fanout of codedreduce: 1 is too small; give at least 2"),
        ("gc(root=0)", "root of gc: 0 is not a choice; use worker or separate"),
        ("gc(beyond=hope)", "beyond of gc: hope is not a choice; use wait, raise or partial"),
        ("gc(fanout=2)", "gc has no argument 'fanout'; it takes stragglers, code, root and beyond"),
        (
            "gc(code=cyclic, beyond=partial)",
            "gc(code=cyclic, beyond=partial) is unsound: under code=cyclic some workers' answers "
            "are no part of the sum; use code=fractional, or beyond=wait or raise",
        ),
    ],
)
def test_what_can_not_be_written(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    assert str(caught.value) == message


def test_a_batch_that_is_too_small_for_everybody() -> None:
    with pytest.raises(LayoutError) as caught:
        planted("fractional", 20, 4, 1).refuse_batch(3)
    assert str(caught.value) == (
        "a batch of 3 has no sample for worker 0, which computes 1/6 of it; give a batch of 6 or "
        "more"
    )


@pytest.mark.parametrize(("workers", "fanout", "stragglers"), [(3, 4, 3), (5, 2, 2), (1, 3, 1)])
def test_a_tree_that_does_not_fit(workers: int, fanout: int, stragglers: int) -> None:
    with pytest.raises(LayoutError, match=r"can't do without \d.*; use "):
        even_children(range(workers), fanout, stragglers)
    with pytest.raises(LayoutError, match=r"can't do without \d.*; use "):
        planted("fractional", workers, fanout, stragglers)

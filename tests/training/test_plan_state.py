"""State that a plan keeps: what becomes of it when plans or members change."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thalweg.compress import Combine, Kept
from thalweg.training.plan_state import (
    after_member_change,
    packed,
    redistributed,
    residuals_in,
    summands,
    unpacked,
)


def kept(combine: Combine, value: float, *, residual: bool = False) -> Kept:
    return Kept(combine=combine, arrays={"w": np.full(4, value, np.float32)}, residual=residual)


def state(scale: float) -> dict[str, Kept]:
    """Of every sort; whole numbers, so that nothing is rounded."""
    return {
        "vote": kept(Combine.OWN, 2 * scale, residual=True),
        "place": kept(Combine.OWN, 3 * scale),
        "velocity": kept(Combine.SUM, 5 * scale),
        "factor": kept(Combine.EQUAL, 7),
        "residual": kept(Combine.SUM, 11 * scale, residual=True),
    }


def values(found: Mapping[str, Kept]) -> dict[str, float]:
    return {kind: float(one.arrays["w"][0]) for kind, one in found.items()}


def test_a_residual_of_ones_own_becomes_a_summand() -> None:
    assert values(summands(state(1))) == {"residual": 13, "velocity": 5}
    assert values(after_member_change(state(1))) == {"residual": 13, "velocity": 5, "factor": 7}
    assert residuals_in(state(1))["w"].tolist() == [13] * 4


def test_what_goes_on_may_go_on_again() -> None:
    once = after_member_change(state(1))
    assert values(after_member_change(once)) == values(once)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=5), st.sampled_from([1, 2, 4, 8]))
def test_sums_stay(scales: list[int], ranks: int) -> None:
    shares = values(redistributed([state(scale) for scale in scales], ranks))
    assert {kind: share * ranks for kind, share in shares.items()} == {
        "residual": 13 * sum(scales),
        "velocity": 5 * sum(scales),
    }


def test_packed_and_unpacked() -> None:
    found = unpacked(packed(state(1)))
    assert values(found) == values(state(1))
    for kind, one in state(1).items():
        assert (found[kind].combine, found[kind].residual) == (one.combine, one.residual)


@pytest.mark.parametrize(
    ("kind", "combine", "residual"),
    [
        ("residual", Combine.SUM, True),
        ("velocity", Combine.SUM, False),
        ("vote", Combine.OWN, True),
        ("factor", Combine.EQUAL, False),
        ("left", Combine.EQUAL, False),
    ],
)
def test_earlier_checkpoints_declare_nothing(kind: str, combine: Combine, residual: bool) -> None:
    found = unpacked({"torch": "00", "compression": {kind: {"w": torch.ones(4)}}})
    assert (found[kind].combine, found[kind].residual) == (combine, residual)
    assert unpacked({"torch": "00"}) == {}

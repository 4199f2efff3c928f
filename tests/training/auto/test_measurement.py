from __future__ import annotations

import pytest

from thalweg.catalog import parse_plan
from thalweg.training.auto.measurement import profiles_compute_alone


@pytest.mark.parametrize(
    ("sync", "tells"),
    [
        ("ring", True),
        ("hierarchical", True),
        ("ring+fp16", False),  # it compresses during backward
        ("ddp", False),
        ("local_sgd(every=8)", False),
        ("gc(stragglers=1)", False),
    ],
)
def test_which_plans_show_what_is_computed(sync: str, tells: bool) -> None:
    assert profiles_compute_alone(parse_plan(sync)) is tells

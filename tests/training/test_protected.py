"""All ranks are protected in the same way, or say before the first step who isn't."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.workers import TIMEOUT, listen, on_ranks, one_value, raised
from thalweg.training import attach


def attached(sync: str = "ring") -> list[str]:
    """What is logged meanwhile."""
    heard: list[str] = []
    listen(heard)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = attach(model, optimizer, sync=sync, timeout=TIMEOUT)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    run.close()
    return heard


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("THALWEG_CURVE", "on", "ranks? 1: attach.*: THALWEG_CURVE is 'on', on rank 0 'off'"),
        ("THALWEG_SECRET", "another than others have", "rank 1: attach.*: THALWEG_SECRET is '"),
    ],
)
def test_a_difference_is_named(variable: str, value: str, named: str) -> None:
    def work(rank: int) -> dict[str, Any]:
        if rank == 1:
            os.environ[variable] = value
        return raised(attached)

    results = on_ranks(3, work)
    assert one_value(results, "kind") == "Mismatch"
    assert value not in results[0]["text"] or variable == "THALWEG_CURVE"
    assert re.search(named, results[0]["text"]), results[0]["text"]


@pytest.mark.parametrize("secret", [True, False])
def test_rank_0_says_so_if_anybody_may_join(secret: bool) -> None:
    def work(rank: int) -> dict[str, Any]:
        os.environ["THALWEG_CURVE"] = "on"
        if not secret:
            del os.environ["THALWEG_SECRET"]
        return {"heard": attached()}

    first, second = (result["heard"] for result in on_ranks(2, work))
    assert not second
    if secret:
        assert not first
    else:
        [said] = first
        assert "whoever reaches its store can join it; set THALWEG_SECRET" in said

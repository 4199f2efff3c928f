"""Cases that share their processes don't share their failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.training.conftest import Case, InOneCrew, outcomes
from tests.training.workers import TIMEOUT
from thalweg.errors import WorkerFailed
from thalweg.training import attach


def mean_of_ranks(rank: int, name: str) -> dict[str, Any]:
    model = nn.Linear(1, 1)
    run = attach(model, torch.optim.SGD(model.parameters(), 0.1), plan="ring", timeout=TIMEOUT)
    if (rank, name) == (1, "fails"):
        raise ValueError("in this case alone")
    mean = torch.tensor([float(rank)])
    run.all_reduce_mean([mean])
    run.close()
    return {"mean": mean.item(), "name": name}


def test_the_others_have_their_results_though_one_fails() -> None:
    cases = [Case(name=n, parameters={"name": n, "unused": 1}) for n in ("a", "fails", "b", "c")]
    found = outcomes(2, mean_of_ranks, cases)
    for name in ("a", "b", "c"):
        assert found[name] == [{"mean": 0.5, "name": name}] * 2
    failed = found["fails"]
    assert isinstance(failed, WorkerFailed)
    assert "rank 1: ValueError: in this case alone" in str(failed)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["a", "b"])
def test_each_case_has_its_own(name: str, size: int, in_one_crew: InOneCrew) -> None:
    assert in_one_crew(size, mean_of_ranks) == [{"mean": (size - 1) / 2, "name": name}] * size

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from thalweg.training.consistency_check import Description, description, differences

SETTINGS = {"batch": 8, "samples": 100, "seed": 0}


def described(
    model: nn.Module | None = None, *, plan: str = "ring", lr: float = 0.1, **settings: Any
) -> Description:
    model = model or nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return description(plan, model, optimizer, SETTINGS | settings)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    return model


def test_the_same() -> None:
    assert not list(differences(described(), described()))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (described(plan="tree"), "plan tree, on rank 0 ring"),
        (described(lr=0.2), "optimizer: group 0, lr is 0.2, on rank 0 0.1"),
        (described(samples=99), "attach(): samples is 99, on rank 0 100"),
        (described(seed=1), "attach(): seed is 1, on rank 0 0"),
        (described(frozen()), "model: 0.bias is [2] float32 frozen, on rank 0 [2] float32"),
        (
            described(nn.Sequential(nn.Linear(3, 2), nn.Identity())),
            "model: 1.weight is absent, on rank 0 [2] float32",
        ),
        (
            described(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=True)).double()),
            "model: 0.weight is [2, 3] float64, on rank 0 [2, 3] float32",
        ),
        (
            described(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))),
            "model: buffer 1.running_mean is absent, on rank 0 [2] float32",
        ),
    ],
)
def test_what_is_said_first(own: Description, said: str) -> None:
    assert next(differences(described(), own)) == said


def test_another_order() -> None:
    one = described(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    other = described(nn.ModuleDict({"b": nn.Linear(2, 2), "a": nn.Linear(2, 2)}))
    assert list(differences(one, other)) == ["model: the parameters are in another order"]

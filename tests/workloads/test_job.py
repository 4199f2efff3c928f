"""What is common to all jobs: where models start, how they are judged and described."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from thalweg.errors import WorkloadError
from thalweg.facts import Tensor
from thalweg.workloads import accuracy, describe, evaluating, mean_loss, seeded


def test_ranks_that_are_threads_start_from_the_same_values() -> None:
    build = seeded(lambda: nn.Sequential(*(nn.Linear(30, 30) for _ in range(20))))
    with ThreadPoolExecutor(8) as threads:
        models = list(threads.map(lambda _: build(), range(32)))
    values = [nn.utils.parameters_to_vector(model.parameters()) for model in models]
    assert all(torch.equal(values[0], other) for other in values)


def test_the_random_state_is_as_before_even_if_building_fails() -> None:
    def build() -> nn.Module:
        torch.rand(1)
        raise ValueError("no such layer")

    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="no such layer"):
        seeded(build)()
    assert torch.equal(torch.get_rng_state(), state)


def test_every_module_is_back_in_its_own_mode() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout(), nn.Linear(1, 1))
    model[1].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == [True, True, False, True]
    with pytest.raises(ValueError, match="no such sample"), evaluating(model):
        raise ValueError("no such sample")
    assert model.training
    assert torch.is_grad_enabled()


def test_accuracy_and_mean_loss() -> None:
    scores = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [5.0, 4.0]])
    labels = torch.tensor([0, 1, 1, 0])
    assert accuracy((scores, labels))(nn.Identity()) == 0.75
    distance = mean_loss(lambda model, batch: model(batch[0]).sum(dim=1), (scores,))
    assert distance(nn.Identity()) == 4.0


def test_a_description_has_what_is_trained_in_the_order_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))
    model[0].bias.requires_grad_(False)
    model[2].to(torch.bfloat16)
    assert describe("mine", model).tensors == (
        Tensor(name="0.weight", shape=(2, 3)),
        Tensor(name="1.weight", shape=(2,)),
        Tensor(name="1.bias", shape=(2,)),
        Tensor(name="2.weight", shape=(1, 2), dtype="bfloat16"),
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Linear(2, 2, dtype=torch.complex64),
            "tensor weight has dtype 'complex64'; use float64",
        ),
        (nn.ReLU(), "workload mine has no tensors; add at least one"),
    ],
)
def test_models_that_no_plan_can_carry(model: nn.Module, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        describe("mine", model)

"""A model with any number of parameters, each used once per sample.

    f(x) = sum_r (-1)^r relu(w_r . x + b_r) / sqrt(m)

is a network with one hidden layer of m units whose outer signs are fixed, as in the analysis of
wide networks (Du et al., ICLR 2019): gradient descent on the w_r alone reduces the loss at the same
rate for every m. The rows w_r are split into several matrices, like layers, of 1,024 columns or, in
small models, about as many columns as rows; the remaining parameters are biases of the last units.
So the count is exact, and a sample needs little memory: one activation per row.

The samples come from a few hidden factors, on which both input and target depend, so the model
generalises to held-out samples.
"""

from __future__ import annotations

from functools import partial
from math import isqrt

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from thalweg.declarations import Parameter
from thalweg.errors import WorkloadError
from thalweg.facts import Count
from thalweg.workloads.job import DATA_SEED, Batch, Job, JobKind, mean_loss, seeded

MAX_COLUMNS = 1024
MIN_LAYERS = 4  # by default
SAMPLE_COUNT = 2048
HELD_OUT_COUNT = 256
FACTOR_COUNT = 8
MAX_PARAMETERS = Count.parse("4G")


def make(name: str, params: Count, layers: int | None) -> Job:
    if not 1 <= params.value <= MAX_PARAMETERS.value:
        raise WorkloadError(
            f"params of {name} is {params}",
            f"give 1 to {MAX_PARAMETERS}",
        )
    columns = min(MAX_COLUMNS, isqrt(params.value))
    units, biases = divmod(params.value, columns)
    if layers is None:
        layers = min(units, max(MIN_LAYERS, -(-units // MAX_COLUMNS)))
    if layers > units:
        raise WorkloadError(
            f"layers of {name}: {units} rows can't be split into {layers} layers",
            f"give at most {units}",
        )
    inputs, targets = _draw(columns)
    n = SAMPLE_COUNT
    return Job(
        name=name,
        model=seeded(partial(Wide, columns, units, biases, layers)),
        data=TensorDataset(inputs[:n], targets[:n]),
        losses=squared_errors,
        optimizer=partial(torch.optim.SGD, lr=1 / columns),
        metric="loss",
        evaluate=mean_loss(squared_errors, (inputs[n:], targets[n:])),
        batch=32,
    )


class Wide(nn.Module):
    """One hidden layer, split into matrices whose heights differ by at most one row."""

    def __init__(self, columns: int, units: int, biases: int, layers: int) -> None:
        super().__init__()
        self.units = units
        heights = [units // layers + (layer < units % layers) for layer in range(layers)]
        self.weights = nn.ParameterList(
            torch.randn(height, columns) / columns**0.5 for height in heights
        )
        self.biases = nn.ParameterList([torch.zeros(biases)] if biases else [])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat([functional.linear(inputs, weight) for weight in self.weights], dim=-1)
        for bias in self.biases:
            hidden = hidden + functional.pad(bias, (self.units - len(bias), 0))
        active = hidden.relu()
        signed = active[..., ::2].sum(dim=-1) - active[..., 1::2].sum(dim=-1)
        outputs: torch.Tensor = signed / self.units**0.5
        return outputs


def squared_errors(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return functional.mse_loss(model(inputs), targets, reduction="none")


def _draw(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of variance 1, and targets that are a nonlinear function of the factors' sum."""
    generator = torch.Generator().manual_seed(DATA_SEED)
    scale = FACTOR_COUNT**0.5
    mixing = torch.randn(FACTOR_COUNT, columns, generator=generator) / scale
    samples = SAMPLE_COUNT + HELD_OUT_COUNT
    factors = torch.randn(samples, FACTOR_COUNT, generator=generator)
    return factors @ mixing, factors.sum(dim=1).div(scale).tanh() + 1


JOB = JobKind(
    name="synthetic",
    summary="a wide network with the given number of parameters",
    make=make,
    parameters={
        "params": Parameter(kind=Count, default=Count.parse("2.5M"), help="number of parameters"),
        "layers": Parameter(
            kind=int, default=None, least=1, help="matrices; of at most 1024 rows if absent"
        ),
    },
)

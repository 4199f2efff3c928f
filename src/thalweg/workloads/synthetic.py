"""A model of any size: as many parameters as asked for, each used once a sample.

    f(x) = sum_r (-1)^r relu(w_r . x + b_r) / sqrt(m)

is a network with one hidden layer of m units whose outer signs are fixed, as in the analysis of
wide networks (Du et al., ICLR 2019): gradient descent on the w_r alone brings the loss down at the
same rate however large m is. The rows w_r are cut into several matrices, as layers would be, of
1,024 columns or, in small models, about as many columns as rows; the remainder are biases of the
last units. So the count is exact, and a sample takes little memory: an activation for each row.

The samples come from a few hidden factors, which both the input and the target follow, so what is
learned holds for samples that weren't seen.
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

MAX_SYNTHETIC_COLUMNS = 1024
MIN_SYNTHETIC_LAYERS = 4  # layers, if nobody says how many
SYNTHETIC_SAMPLE_COUNT = 2048
SYNTHETIC_HELD_OUT_COUNT = 256
SYNTHETIC_FACTOR_COUNT = 8
MAX_SYNTHETIC_PARAMETERS = Count.parse("4G")


def make(name: str, params: Count, layers: int | None) -> Job:
    if not 1 <= params.value <= MAX_SYNTHETIC_PARAMETERS.value:
        raise WorkloadError(
            f"params of {name}: {params} is not a size of a model",
            f"give 1 to {MAX_SYNTHETIC_PARAMETERS}",
        )
    columns = min(MAX_SYNTHETIC_COLUMNS, isqrt(params.value))
    units, biases = divmod(params.value, columns)
    if layers is None:
        layers = min(units, max(MIN_SYNTHETIC_LAYERS, -(-units // MAX_SYNTHETIC_COLUMNS)))
    if layers > units:
        raise WorkloadError(
            f"layers of {name}: {layers} layers can't share {units} rows",
            f"give at most {units}",
        )
    inputs, targets = _draw(columns)
    return Job(
        name=name,
        model=seeded(partial(Wide, columns, units, biases, layers)),
        data=TensorDataset(inputs[:SYNTHETIC_SAMPLE_COUNT], targets[:SYNTHETIC_SAMPLE_COUNT]),
        losses=squared_errors,
        optimizer=partial(torch.optim.SGD, lr=1 / columns),
        metric="loss",
        evaluate=mean_loss(
            squared_errors, (inputs[SYNTHETIC_SAMPLE_COUNT:], targets[SYNTHETIC_SAMPLE_COUNT:])
        ),
        batch=32,
    )


class Wide(nn.Module):
    """One hidden layer, cut into matrices of equal height up to one row."""

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
    """Inputs with elements of variance 1, and targets that are a bent sum of the factors."""
    generator = torch.Generator().manual_seed(DATA_SEED)
    mixing = (
        torch.randn(SYNTHETIC_FACTOR_COUNT, columns, generator=generator)
        / SYNTHETIC_FACTOR_COUNT**0.5
    )
    factors = torch.randn(
        SYNTHETIC_SAMPLE_COUNT + SYNTHETIC_HELD_OUT_COUNT,
        SYNTHETIC_FACTOR_COUNT,
        generator=generator,
    )
    return factors @ mixing, factors.sum(dim=1).div(SYNTHETIC_FACTOR_COUNT**0.5).tanh() + 1


JOB = JobKind(
    name="synthetic",
    summary="a wide network with as many parameters as asked for",
    make=make,
    parameters={
        "params": Parameter(kind=Count, default=Count.parse("2.5M"), help="how many numbers"),
        "layers": Parameter(
            kind=int,
            default=None,
            least=1,
            help="matrices; of at most 1024 rows if absent",
        ),
    },
)

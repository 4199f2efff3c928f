"""A job whose parameters after each step are known bit for bit, however its batches are sharded.

    loss_i(w) = <w, x_i>        gradient of a batch B: the mean of x_i over B

Samples are small integers and a batch has 2^k of them, so every sum of gradients is exact in
float32 in any order, up to the rounding of a division by the number of ranks. `snap` undoes that
before the optimizer's step: a mean is a multiple of 1/|B|. Everything after that is elementwise.
One process can therefore compute the parameters of every rank after each step: a step or a sample
that was lost, or applied twice or partly, shows from then on.

The result of plans that wait for no rank isn't determined. There each rank has a counter among the
parameters that only its own gradients change: by one each, times the weight that the plan gives
them (`checks/gradient_counts.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

from thalweg.training.data.sampler import BatchSampler

MATRIX_COUNT, MATRIX_ROWS, MATRIX_COLUMNS = 4, 100, 80
PARAMETER_COUNT = (MATRIX_COUNT * MATRIX_COLUMNS + 1) * MATRIX_ROWS
CHAOS_SAMPLE_COUNT, CHAOS_BATCH_SAMPLES = 256, 64
CHECKPOINT_PERIOD_STEPS = 20
MAX_SAMPLE_ELEMENT = 8
CHAOS_LEARNING_RATE, CHAOS_MOMENTUM = 2.0**-6, 0.9
SIGNED_SUM_COUNT = 4  # each with its own signs
CHAOS_DATA_SEED = 20


class Linear(nn.Module):
    """A linear model whose parameters are some matrices and a vector."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(CHAOS_DATA_SEED)
        shapes = [(MATRIX_ROWS, MATRIX_COLUMNS)] * MATRIX_COUNT + [(MATRIX_ROWS,)]
        self.parts = nn.ParameterList(_integers(shape, generator) for shape in shapes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ parameters_to_vector(self.parts)


class Counted(Linear):
    """A linear model with a gradient counter for each rank."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.counters = nn.Parameter(torch.zeros(ranks, dtype=torch.float64))


def _integers(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    most = MAX_SAMPLE_ELEMENT
    return torch.randint(-most, most, shape, generator=generator).float()


@cache
def samples() -> TensorDataset:
    """Samples of small integers, each with its index."""
    generator = torch.Generator().manual_seed(CHAOS_DATA_SEED + 1)
    inputs = _integers((CHAOS_SAMPLE_COUNT, PARAMETER_COUNT), generator)
    return TensorDataset(inputs, torch.arange(CHAOS_SAMPLE_COUNT))


class Counting(torch.optim.SGD):
    """SGD that adds gradients to counters unscaled, whatever learning rate a plan sets."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[-1]["lr"] = 1.0
        return super().step(closure)


def optimizer_of(model: Linear) -> torch.optim.Optimizer:
    make = Counting if isinstance(model, Counted) else torch.optim.SGD
    optimizer = make(model.parts, lr=CHAOS_LEARNING_RATE, momentum=CHAOS_MOMENTUM, foreach=False)
    if isinstance(model, Counted):
        optimizer.add_param_group({"params": [model.counters], "momentum": 0.0})
    return optimizer


@torch.no_grad()
def snap(model: Linear) -> None:
    """Round gradients to multiples of 1/|B|, which exact means are."""
    for parameter in model.parts:
        if parameter.grad is not None:
            parameter.grad.mul_(CHAOS_BATCH_SAMPLES).round_().div_(CHAOS_BATCH_SAMPLES)


def digest(model: nn.Module) -> str:
    content = b"".join(part.detach().numpy().tobytes() for part in model.parameters())
    return f"{zlib.crc32(content):08x}"


@cache
def _signs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(CHAOS_DATA_SEED + 2)
    bits = torch.randint(0, 2, (SIGNED_SUM_COUNT, PARAMETER_COUNT), generator=generator)
    return bits.double().mul_(2).sub_(1)


@torch.no_grad()
def sums(model: Linear) -> tuple[float, ...]:
    """Signed sums of the parameters, which add up over ranks as parameters do."""
    return tuple((_signs() @ parameters_to_vector(model.parts).double()).tolist())


def checksum(indices: list[int]) -> int:
    """A checksum of a set of samples; the checksums of disjoint sets add up."""
    return sum(zlib.crc32(index.to_bytes(4, "little")) for index in indices)


def expected_states(seed: int) -> Iterator[tuple[str, int]]:
    """The digest of all parameters after each step, and the checksum of the step's samples."""
    model = Linear()
    optimizer = optimizer_of(model)
    inputs, _ = samples().tensors
    sampler = BatchSampler(samples=CHAOS_SAMPLE_COUNT, batch=CHAOS_BATCH_SAMPLES, size=1, seed=seed)
    for epoch in count():
        batches = [batch.samples for batch in sampler.slices(epoch, 0)]
        chosen = torch.zeros(len(batches), CHAOS_SAMPLE_COUNT)
        for row, indices in zip(chosen, batches, strict=True):
            row[indices] = 1.0
        means = (chosen @ inputs).div_(CHAOS_BATCH_SAMPLES)
        for indices, mean in zip(batches, means, strict=True):
            parts = mean.split([parameter.numel() for parameter in model.parameters()])
            for parameter, part in zip(model.parameters(), parts, strict=True):
                parameter.grad = part.reshape(parameter.shape).clone()
            optimizer.step()
            yield digest(model), checksum(indices)

"""A job whose steps can be foretold to the last bit, however its samples are shared out.

    loss_i(w) = <w, x_i>        gradient of a batch B: the mean of x_i over B

Samples are small whole numbers and a batch has 2^k of them, so every sum of gradients is exact in
float32 in whatever order it is made, up to the rounding of a division by the number of ranks; that
is undone before the optimizer's step (`snap`): a mean is a multiple of 1/|B|. From there on all is
done element by element. One process can therefore tell what every rank must hold after each step:
a step or a sample that was lost, or applied twice or by half, shows for ever after.

Under plans that wait for nobody nothing can be foretold. There each rank has a counter among the
parameters, which nothing but its own gradients moves: by one each, times what the plan weighs them
with (`counting.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from thalweg.training.data.sampler import BatchSampler

MATRIX_COUNT, MATRIX_ROWS, MATRIX_COLUMNS = 4, 100, 80
PARAMETER_COUNT = (MATRIX_COUNT * MATRIX_COLUMNS + 1) * MATRIX_ROWS
CHAOS_SAMPLE_COUNT, CHAOS_BATCH_SAMPLES = 256, 64
CHECKPOINT_PERIOD_STEPS = 20  # steps
MAX_SAMPLE_ELEMENT = 8  # of the elements of a sample
CHAOS_LEARNING_RATE, CHAOS_MOMENTUM = 2.0**-6, 0.9
SIGNED_SUM_COUNT = 4  # weighed with signs of their own
CHAOS_DATA_SEED = 20


class Linear(nn.Module):
    """Matrices and a vector, as models have them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(CHAOS_DATA_SEED)
        shapes = [(MATRIX_ROWS, MATRIX_COLUMNS)] * MATRIX_COUNT + [(MATRIX_ROWS,)]
        self.parts = nn.ParameterList(
            torch.randint(
                -MAX_SAMPLE_ELEMENT, MAX_SAMPLE_ELEMENT, shape, generator=generator
            ).float()
            for shape in shapes
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ torch.cat([part.reshape(-1) for part in self.parts])


class Counted(Linear):
    """The same with a counter for each of so many ranks."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.counters = nn.Parameter(torch.zeros(ranks, dtype=torch.float64))


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """Samples, each with its number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(CHAOS_DATA_SEED + 1)
        size = (CHAOS_SAMPLE_COUNT, PARAMETER_COUNT)
        self.inputs = torch.randint(
            -MAX_SAMPLE_ELEMENT, MAX_SAMPLE_ELEMENT, size, generator=generator
        ).float()

    def __len__(self) -> int:
        return CHAOS_SAMPLE_COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index], index


@cache
def samples() -> Numbers:
    return Numbers()


class Counting(torch.optim.SGD):
    """Counters go by whole gradients, whatever part of the learning rate those have."""

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
    """Gradients to multiples of 1/|B|, which exact means are."""
    for parameter in model.parts:
        if parameter.grad is not None:
            parameter.grad.mul_(CHAOS_BATCH_SAMPLES).round_().div_(CHAOS_BATCH_SAMPLES)


def digest(model: nn.Module) -> str:
    check = 0
    for parameter in model.parameters():
        check = zlib.crc32(parameter.detach().numpy().tobytes(), check)
    return f"{check:08x}"


@cache
def _signs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(CHAOS_DATA_SEED + 2)
    return (
        torch.randint(0, 2, (SIGNED_SUM_COUNT, PARAMETER_COUNT), generator=generator)
        .double()
        .mul_(2)
        .sub_(1)
    )


@torch.no_grad()
def sums(model: Linear) -> tuple[float, ...]:
    """A few numbers that add up over ranks as parameters do."""
    flat = torch.cat([parameter.reshape(-1) for parameter in model.parts]).double()
    return tuple(float(value) for value in _signs() @ flat)


def checksum(numbers: list[int]) -> int:
    """Of which samples these are; adds up, and tells sets of them apart."""
    return sum(zlib.crc32(number.to_bytes(4, "little")) for number in numbers)


def expected_states(seed: int) -> Iterator[tuple[str, int]]:
    """After each step, from the first on: the digest of all parameters, and the checksum of the
    samples that it took."""
    model = Linear()
    optimizer = optimizer_of(model)
    inputs = samples().inputs
    sampler = BatchSampler(samples=CHAOS_SAMPLE_COUNT, batch=CHAOS_BATCH_SAMPLES, size=1, seed=seed)
    epoch = 0
    while True:
        batch_slices = list(sampler.slices(epoch, 0))
        chosen = torch.zeros(len(batch_slices), CHAOS_SAMPLE_COUNT)
        for number, batch_slice in enumerate(batch_slices):
            chosen[number, batch_slice.samples] = 1.0
        for batch_slice, flat in zip(
            batch_slices, (chosen @ inputs).div_(CHAOS_BATCH_SAMPLES), strict=True
        ):
            place = 0
            for parameter in model.parameters():
                length = parameter.numel()
                parameter.grad = flat[place : place + length].reshape(parameter.shape).clone()
                place += length
            optimizer.step()
            yield digest(model), checksum(batch_slice.samples)
        epoch += 1

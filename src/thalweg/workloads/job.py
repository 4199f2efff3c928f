"""A training job: a model, samples, and how they are judged.

A job is the same wherever it is made: its model starts from the same values, its samples come in
the same order, and the random state of whoever asks for it is left as it was. So ranks that each
make the job by its name hold the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from thalweg.declarations import Parameter
from thalweg.errors import WorkloadError
from thalweg.facts import Tensor, Workload

Batch = tuple[torch.Tensor, ...]

MODEL_SEED = 0
DATA_SEED = 1  # another, or samples would resemble the first weights
MODEL_SEED_STRIDE = 1000  # the seeds of two models
_RANDOM_STATE_LOCK = Lock()  # torch has one random state for all threads, and ranks may be threads


class MakeModel(Protocol):
    def __call__(self, seed: int = 0) -> nn.Module:
        """A fresh one, always with the same values for the same seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A small training job: a model, samples, and how they are judged."""

    name: str  # as written
    model: MakeModel
    data: Dataset[Batch]  # has a length
    losses: Callable[[nn.Module, Batch], torch.Tensor]  # one per sample
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    metric: str  # what `evaluate` returns
    evaluate: Callable[[nn.Module], float]  # on samples that aren't in `data`
    batch: int  # samples a step takes, over all ranks

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise WorkloadError(f"a step of {self.name} takes {self.batch} samples", "take some")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """What a file in this folder declares of the job in it; `make` takes the job's name and a
    value for each parameter."""

    name: str
    summary: str
    make: Callable[..., Job]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


def seeded(build: Callable[[], nn.Module]) -> MakeModel:
    """The same, but every call gives the same values and leaves the random state as it was."""

    def model(seed: int = 0) -> nn.Module:
        with _RANDOM_STATE_LOCK, torch.random.fork_rng(devices=[]):
            # torch.manual_seed would reseed GPUs too
            torch.default_generator.manual_seed(MODEL_SEED + MODEL_SEED_STRIDE * seed)
            return build()

    return model


def describe(name: str, model: nn.Module) -> Workload:
    """What a plan needs to know of this model: the tensors whose gradients travel."""
    return Workload(
        name=name,
        tensors=tuple(
            Tensor(
                name=parameter_name,
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
            )
            for parameter_name, parameter in model.named_parameters()
            if parameter.requires_grad
        ),
    )


def cross_entropies(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels, reduction="none")


def accuracy(held_out: Batch) -> Callable[[nn.Module], float]:
    """The share of samples whose label gets the highest score."""
    inputs, labels = held_out

    def evaluate(model: nn.Module) -> float:
        with evaluating(model):
            right: torch.Tensor = model(inputs).argmax(dim=-1) == labels
        return right.double().mean().item()

    return evaluate


def mean_loss(
    losses: Callable[[nn.Module, Batch], torch.Tensor], held_out: Batch
) -> Callable[[nn.Module], float]:
    def evaluate(model: nn.Module) -> float:
        with evaluating(model):
            return losses(model, held_out).double().mean().item()

    return evaluate


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients, in eval mode; each module is back in its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode

"""A training job: a model, samples, and an evaluation.

A job is deterministic: its model has the same initial values and its samples the same order
wherever it is made, and making it leaves the caller's random state unchanged. So ranks that each
make the job by its name have the same job.
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
DATA_SEED = 1  # unlike MODEL_SEED, or samples would resemble the initial weights
MODEL_SEED_STRIDE = 1000  # between the seeds of two models
_RANDOM_STATE_LOCK = Lock()  # ranks may be threads, which share torch's random state


class MakeModel(Protocol):
    def __call__(self, seed: int = 0) -> nn.Module:
        """Make a model whose initial values depend on the seed alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A small training job: a model, samples, and an evaluation."""

    name: str  # with its arguments, as in the command
    model: MakeModel
    data: Dataset[Batch]  # has a length
    losses: Callable[[nn.Module, Batch], torch.Tensor]  # one per sample
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    metric: str  # name of the value that `evaluate` returns
    evaluate: Callable[[nn.Module], float]  # on samples that aren't in `data`
    batch: int  # samples per step, over all ranks

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise WorkloadError(f"the batch of {self.name} is {self.batch}", "give at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """The declaration of a job in this folder; `make` takes its name and parameters."""

    name: str
    summary: str
    make: Callable[..., Job]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


def seeded(build: Callable[[], nn.Module]) -> MakeModel:
    """Wrap `build` so that values depend on the seed alone and the random state stays unchanged."""

    def model(seed: int = 0) -> nn.Module:
        with _RANDOM_STATE_LOCK, torch.random.fork_rng(devices=[]):
            # unlike torch.manual_seed, this doesn't reseed GPUs
            torch.default_generator.manual_seed(MODEL_SEED + MODEL_SEED_STRIDE * seed)
            return build()

    return model


def describe(name: str, model: nn.Module) -> Workload:
    """The workload of this model: the tensors whose gradients are synchronised."""
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
    """The loss of each sample of a batch of inputs and labels."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels, reduction="none")


def accuracy(held_out: Batch) -> Callable[[nn.Module], float]:
    """An evaluation: the fraction of samples whose label gets the highest score."""

    def is_right(model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs, labels = batch
        right: torch.Tensor = model(inputs).argmax(dim=-1) == labels
        return right

    return mean_loss(is_right, held_out)


def mean_loss(
    losses: Callable[[nn.Module, Batch], torch.Tensor], held_out: Batch
) -> Callable[[nn.Module], float]:
    """An evaluation: the mean of these losses, or other values of each sample."""

    def evaluate(model: nn.Module) -> float:
        with evaluating(model):
            return losses(model, held_out).double().mean().item()

    return evaluate


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable gradients and set eval mode; restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode

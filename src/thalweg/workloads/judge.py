"""How models are judged: a loss for each sample in training, one number on held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from thalweg.workloads.job import Batch


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

"""Handwritten digits: 1,797 images of 8 x 8 pixels from scikit-learn, and an MLP.

The layers are wide for so small a task, so that a gradient has a realistic size: 2.3 MB. 60 steps,
five passes over the samples, reach an accuracy of more than 0.95.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from itertools import chain, pairwise

import torch
from torch import nn
from torch.utils.data import TensorDataset

from thalweg.workloads.job import DATA_SEED, Job, JobKind, accuracy, cross_entropies, seeded

DIGITS_HELD_OUT_FRACTION = 0.2
HIDDEN = 512


def make(name: str) -> Job:
    datasets = import_module("sklearn.datasets")  # slow to import
    pixels, classes = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(DATA_SEED))
    images = torch.from_numpy(pixels).float()[order]
    labels = torch.from_numpy(classes).long()[order]
    count = round(len(images) * (1 - DIGITS_HELD_OUT_FRACTION))
    images = (images - images[:count].mean()) / images[:count].std()
    return Job(
        name=name,
        model=seeded(_mlp),
        data=TensorDataset(images[:count], labels[:count]),
        losses=cross_entropies,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        metric="accuracy",
        evaluate=accuracy((images[count:], labels[count:])),
        batch=128,
    )


def _mlp() -> nn.Module:
    hidden = [(_linear(*pair), nn.ReLU()) for pair in pairwise((64, HIDDEN, HIDDEN, HIDDEN))]
    return nn.Sequential(*chain.from_iterable(hidden), _linear(HIDDEN, 10))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A layer that keeps the scale of activations (He et al., ICCV 2015).

    With torch's default initialisation they shrink, and the first 30 steps only restore them.
    """
    layer = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer


JOB = JobKind(
    name="digits",
    summary="handwritten digits, a multilayer perceptron of 0.56 M parameters",
    make=make,
)

"""Softmax regression on a mixture of Gaussians, of the size of CodedReduce's experiments.

    x = mean of its class + noise,  loss = -log softmax(W x + b)[class]

A step takes all samples, by default 6,552 of 5,000 features, as in the experiments behind
CodedReduce (Reisizadeh et al., 2019): plain gradient descent, with much computation and little
communication. The means lie at distance 4 from the origin, and the noise is normal with a deviation
from 0.3 in the first feature to 3 in the last. The first step finds the difference of the means;
the next ones weight the features.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

from thalweg.declarations import Parameter
from thalweg.errors import WorkloadError
from thalweg.facts import about
from thalweg.workloads.job import DATA_SEED, Batch, Job, JobKind, accuracy, cross_entropies, seeded

CLASS_DISTANCE = 4.0
FEATURE_SCALE_DECADES = 0.5  # above and below 1
LOGISTIC_HELD_OUT_COUNT = 1000
MAX_LOGISTIC_DATA_BYTES = 4 * 10**9


def make(name: str, features: int, classes: int, samples: int) -> Job:
    nbytes = 4 * features * samples
    if nbytes > MAX_LOGISTIC_DATA_BYTES:
        raise WorkloadError(
            f"the samples of {name} take {about(nbytes, 'B')}",
            f"reduce features or samples to at most {about(MAX_LOGISTIC_DATA_BYTES, 'B')}",
        )
    training, held_out = _draw(features, classes, samples)
    return Job(
        name=name,
        model=seeded(partial(_all_zero, features, classes)),
        data=TensorDataset(*training),
        losses=cross_entropies,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        metric="accuracy",
        evaluate=accuracy(held_out),
        batch=samples,
    )


def _all_zero(features: int, classes: int) -> nn.Module:
    """A linear model whose parameters are zero."""
    model = nn.Linear(features, classes)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


@lru_cache(maxsize=1)  # 131 MB by default, and ranks may be threads
def _draw(features: int, classes: int, samples: int) -> tuple[Batch, Batch]:
    """The training samples and the held-out samples, each with its label."""
    generator = torch.Generator().manual_seed(DATA_SEED)
    directions = torch.randn(classes, features, generator=generator)
    means = CLASS_DISTANCE * directions / directions.norm(dim=1, keepdim=True)
    total = samples + LOGISTIC_HELD_OUT_COUNT
    labels = torch.randint(classes, (total,), generator=generator)
    inputs = torch.randn(total, features, generator=generator)
    inputs *= torch.logspace(-FEATURE_SCALE_DECADES, FEATURE_SCALE_DECADES, features)
    inputs += means[labels]
    return (inputs[:samples], labels[:samples]), (inputs[samples:], labels[samples:])


JOB = JobKind(
    name="logistic",
    summary="softmax regression on a mixture of Gaussians, full gradient descent",
    make=make,
    parameters={
        "features": Parameter(kind=int, default=5000, least=1, help="features of a sample"),
        "classes": Parameter(kind=int, default=2, least=2, most=1000, help="classes of samples"),
        "samples": Parameter(kind=int, default=6552, least=1, help="samples to train with"),
    },
)

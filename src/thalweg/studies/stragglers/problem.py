"""The training problem of the straggler study: softmax regression, solved before the clock starts.

An exact scheme goes through the same models whichever workers straggle, so the models are known
beforehand, and so is every message that a worker will send. The models are those of a few steps of
gradient descent, and are used repeatedly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from thalweg.codes import Allocation

SOFTMAX_SAMPLE_COUNT, SOFTMAX_FEATURE_COUNT = 6552, 5000  # as in the authors' program
MAX_MODEL_COUNT = 8
MAX_TOTAL_MESSAGE_BYTES = 512 << 20  # of all workers and models together
SOFTMAX_LEARNING_RATE = 1e-3  # per sample
SAMPLES_PER_FLOAT64_SUM = 512  # summed at once in double precision
Single = NDArray[np.float32]
Double = NDArray[np.float64]


@dataclass(frozen=True)
class Softmax:
    """Samples whose number of features makes a gradient of `elements` values for all classes."""

    elements: int
    samples: int = SOFTMAX_SAMPLE_COUNT
    models: int = MAX_MODEL_COUNT
    seed: int = 0

    @classmethod
    def for_workers(cls, workers: int, elements: int, seed: int) -> Softmax:
        """A problem with as many models as there is memory for all workers' messages."""
        most = MAX_TOTAL_MESSAGE_BYTES // (4 * elements * workers)
        return cls(elements, models=max(1, min(MAX_MODEL_COUNT, most)), seed=seed)

    @property
    def classes(self) -> int:
        """The number of classes, at least two."""
        return max(2, self.elements // SOFTMAX_FEATURE_COUNT)

    @property
    def features(self) -> int:
        return -(-self.elements // self.classes)

    @cached_property
    def _data(self) -> tuple[Single, NDArray[np.int64]]:
        draw = np.random.default_rng(self.seed)
        truth = draw.standard_normal((self.features, self.classes), dtype=np.float32)
        inputs = draw.standard_normal((self.samples, self.features), dtype=np.float32)
        return inputs, np.argmax(inputs @ truth, axis=1)

    @cached_property
    def _errors(self) -> list[Single]:
        """The predicted probabilities of each sample minus its true ones, by model."""
        inputs, labels = self._data
        model = np.zeros((self.features, self.classes), np.float32)
        found = []
        for _ in range(self.models):
            scores = inputs @ model
            odds = np.exp(scores - scores.max(axis=1, keepdims=True))
            error = odds / odds.sum(axis=1, keepdims=True)
            error[np.arange(self.samples), labels] -= 1
            found.append(error)
            model = model - SOFTMAX_LEARNING_RATE * (inputs.T @ error)
        return found

    @cached_property
    def true_gradients(self) -> list[Double]:
        """The sum over all samples in double precision, by model."""
        inputs, _ = self._data
        totals = [np.zeros((self.features, self.classes)) for _ in self._errors]
        for start in range(0, self.samples, SAMPLES_PER_FLOAT64_SUM):
            some = inputs[start : start + SAMPLES_PER_FLOAT64_SUM].T.astype(np.float64)
            for total, error in zip(totals, self._errors, strict=True):
                total += some @ error[start : start + SAMPLES_PER_FLOAT64_SUM]
        return [total.reshape(-1)[: self.elements] for total in totals]

    def gradients(self, allocation: Allocation) -> list[list[Single]]:
        """The sum over the samples of each cell of the allocation, by model."""
        cuts = [round(cut * self.samples) for cut in allocation.cuts]
        return [
            [self._part(error, start, stop) for start, stop in pairwise(cuts)]
            for error in self._errors
        ]

    def _part(self, error: Single, start: int, stop: int) -> Single:
        inputs, _ = self._data
        return np.ascontiguousarray(
            (inputs[start:stop].T @ error[start:stop]).reshape(-1)[: self.elements]
        )


def message(gradients: Sequence[Single], weights: Mapping[int, float]) -> Single:
    """The message of a worker: its cells times their weights."""
    if list(weights.values()) == [1.0]:
        return gradients[next(iter(weights))]
    total = np.zeros_like(gradients[0], np.float64)
    for cell, weight in weights.items():
        total += weight * gradients[cell]
    return total.astype(np.float32)


def distance(one: Single | Double, truth: Single | Double) -> float:
    """The distance of two gradients relative to the norm of the true one."""
    return float(np.linalg.norm(one - truth) / np.linalg.norm(truth))

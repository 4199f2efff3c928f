"""How far from the optimum replicas stay, where that can be proved in a few lines.

For f_i(x) = (x - c_i)' H (x - c_i) / 2 with mu <= H <= L, rank i's gradients are H (x_i - c_i) with
independent noise of variance at most sigma^2, and zeta^2 is the mean of |grad f_i - grad f|^2. With
a learning rate lr <= 1/L, at every step and from equal replicas,

    E mean_i |x_i(t) - x*|^2  <=  (1 - lr mu)^(2t) |x(0) - x*|^2  +  lr sigma^2 / (N mu (2 - lr mu))
                                  +  lr^2 (sigma^2 D + zeta^2 R^2) / (1 - lr L d R)^2

The first two terms are those of their mean, which is SGD on all samples. The third is their drift:
D is the expected drift of the table before averaging, at its worst step; R = d + sum_k s_k, where
s_k is what k steps of the table leave of the worst disagreement at most; d is how late results are
applied, zero for most plans (the sum of the different delays in the table). The derivation is in
docs/does-group-averaging-converge.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from thalweg.predict.mixing import Mixing, expected_drift

SMALL = 0.1  # of the worst disagreement; what comes later is bounded by a geometric series


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A strongly convex quadratic for every rank, all of one Hessian."""

    smoothness: float  # L
    convexity: float  # mu
    noise: float  # sigma, of a rank's whole gradient
    heterogeneity: float = 0.0  # zeta


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceBound:
    """Squared distances: of the mean to the optimum in the long run, of replicas to their mean, and
    what is left of the first one after a step."""

    of_mean: float
    apart: float
    per_step: float

    def after(self, steps: int, first: float) -> float:
        """To the optimum; `first` is the squared distance that all began with."""
        return self.per_step**steps * first + self.of_mean + self.apart


def distance_bound(mixing: Mixing, problem: Problem, lr: float) -> DistanceBound:
    """Infinite where nothing is promised: not connected, or too large a learning rate."""
    if lr * problem.smoothness > 1:
        return DistanceBound(of_mean=inf, apart=inf, per_step=1.0)
    rate = lr * problem.convexity
    variance, reached = problem.noise**2, reach(mixing)
    gain = lr * problem.smoothness * latest(mixing) * reached if latest(mixing) else 0.0
    noise = variance * (float(expected_drift(mixing).max()) + 1 - 1 / mixing.size)
    constant = (problem.heterogeneity * reached) ** 2 if problem.heterogeneity else 0.0
    return DistanceBound(
        of_mean=lr * variance / (mixing.size * problem.convexity * (2 - rate)),
        apart=lr**2 * (noise + constant) / (1 - gain) ** 2 if gain < 1 else inf,
        per_step=(1 - rate) ** 2,
    )


def latest(mixing: Mixing) -> int:
    """The sum of the different delays with which results are applied."""
    return sum({exchange.delay for exchanges in mixing.steps for exchange in exchanges})


def reach(mixing: Mixing) -> float:
    """R: how many steps of a constant disagreement add up, at most. Where s_K is small, the rest of
    the sum is at most s_K of it, again and again: s_(j+k) <= s_j s_k."""
    if not mixing.is_connected:
        return inf
    centred = np.eye(mixing.size) - 1 / mixing.size
    products = [centred for _ in mixing.steps]  # of the last steps, up to each of the period
    total, left, length = 0.0, 1.0 if mixing.size > 1 else 0.0, 0
    while left > SMALL:
        total += left
        products = [
            mixing.mixed_first(end - length, product) for end, product in enumerate(products)
        ]
        left = max(float(np.linalg.norm(product, 2)) for product in products)
        length += 1
    return latest(mixing) + total / (1 - left)

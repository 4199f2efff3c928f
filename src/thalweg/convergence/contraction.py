"""How fast a table of exchanges brings replicas together, if nothing drives them apart.

With P = W_{T-1} ... W_0 over a period of T steps, less the mean:

    lambda_2   the largest absolute eigenvalue: the rate in the long run, lambda_2^(1/T) a step
    sigma_2    the largest singular value: what one period leaves of the worst disagreement
    k(eps)     steps until eps is left of the worst disagreement, from the worst step to begin with

Both are one for tables that aren't connected and zero for those that reach the mean exactly. Long
periods leave less than a floating-point number tells from rounding, so products are kept scaled;
lambda_2 is Gelfand's lim ||P^m||^(1/m), by squaring.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, exp, inf, log

import numpy as np

from thalweg.convergence.mixing import Matrix, Mixing

NOTHING = 1e-10  # a step that leaves less of what was there leaves nothing but rounding
SQUARINGS = 30
LONGEST_COUNTED = 512  # steps, where k(eps) is counted and not estimated
PHASES = 512  # to begin with; of longer periods, the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    gap: float  # 1 - lambda_2
    sigma_gap: float  # 1 - sigma_2
    per_step: float


def contraction_of(mixing: Mixing) -> Contraction:
    if not mixing.is_connected:
        return Contraction(gap=0.0, sigma_gap=0.0, per_step=1.0)
    product, scale = _centred(np.eye(mixing.size)), 0.0
    steps = len(mixing.steps)
    for step in range(steps):
        product, scale = _scaled(_centred(mixing.mixed(step, product)), scale)
    sigma = float(np.linalg.norm(product, 2)) * exp(scale)
    eigenvalue = 0.0
    for squaring in range(1, SQUARINGS + 1):
        product, scale = _scaled(_centred(product @ product), 2 * scale)
        eigenvalue = scale / 2**squaring  # its logarithm
    rate = exp(eigenvalue / steps)
    return Contraction(gap=1 - exp(eigenvalue), sigma_gap=1 - sigma, per_step=rate)


def steps_to(mixing: Mixing, eps: float, rate: float) -> int | None:
    """k(eps): None if never. Estimated by `rate`, that of a step in the long run, where it is
    slow."""
    if rate >= 1.0:
        return None
    expected = ceil(log(eps) / log(rate)) if rate > 0 else 0
    if expected > LONGEST_COUNTED:
        return expected
    window = _Window(mixing)
    longest = 0
    for start in range(min(len(mixing.steps), PHASES)):
        window.grow(start + longest)
        while window.left_over() > eps:
            longest += 1
            window.grow(start + longest)
        window.drop_first()
    return longest


class _Window:
    """The product of the matrices of steps in a row, later ones to the left; drops the first step,
    takes in the next. What the longest windows have to take in never gets less, since no W_t makes
    replicas differ by more: so the search goes forward only."""

    def __init__(self, mixing: Mixing) -> None:
        self.mixing = mixing
        self.begins = self.ends = 0
        self.older: deque[Matrix] = deque()  # products from each step to where `newer` begins
        self.newer = _centred(np.eye(mixing.size))

    def grow(self, ends: int) -> None:
        for step in range(self.ends, ends):
            self.newer = _centred(self.mixing.mixed(step, self.newer))
        self.ends = max(self.ends, ends)

    def drop_first(self) -> None:
        if self.begins == self.ends:
            self.grow(self.ends + 1)
        if not self.older:
            product = self.newer = _centred(np.eye(self.mixing.size))
            for step in reversed(range(self.begins, self.ends)):
                product = self.mixing.mixed_first(step, product)
                self.older.appendleft(product)
        self.older.popleft()
        self.begins += 1

    def left_over(self) -> float:
        whole = self.newer @ self.older[0] if self.older else self.newer
        return float(np.linalg.norm(whole, 2))


def _centred(values: Matrix) -> Matrix:
    """Less the mean over ranks, which rounding brings back."""
    means: Matrix = values.mean(axis=0)
    return values - means


def _scaled(product: Matrix, scale: float) -> tuple[Matrix, float]:
    """With a norm of one, and the logarithm of what it had."""
    norm = float(np.linalg.norm(product))
    if norm < NOTHING:
        return np.zeros_like(product), -inf
    return product / norm, scale + log(norm)

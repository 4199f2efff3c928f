"""How far apart replicas are: as measured, and as a table lets expect it.

*Drift* is the root mean square distance of the replicas to their mean. If every rank's step adds
independent noise of variance one to each value,

    B_t = A_{t-1} + I - 11'/N      covariance of the differences to the mean, before averaging
    A_t = W_t B_t W_t'             and after it

has one periodic solution for a connected table. With A_0' = P A_0 P' + Q over a period, it is
A_0 = sum of P^k Q P'^k, added up by doubling (Smith, SIAM J. Appl. Math., 1968). Expected drift is
tr(A_t)/N, averaged over the period; before averaging it is (N-1)/N more, one step's noise.

A result that is applied d steps later leaves its members as they were for d steps: each adds
tr(B_t) - tr(A_t) over its members. With delay=1 and a meeting at every step this makes tr(B_t), as
it must: x(t) = W_{t-1} x(t-1) + u(t) is averaged a step later.

Units: variance of one rank's step, for one value. With noise of variance v in each of n values,
replicas are sqrt(drift * v * n) from their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import ArrayLike

from thalweg.convergence.mixing import Matrix, Mixing

DOUBLINGS = 60
SETTLED = 1e-12  # of the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Root mean square distance to the mean; `relative` to the length of the mean."""

    absolute: float
    relative: float


def drift(replicas: Sequence[ArrayLike]) -> Drift:
    """Of the parameters of every rank."""
    values = np.array([np.ravel(replica) for replica in replicas], dtype=np.float64)
    mean = values.mean(axis=0)
    absolute = float(np.sqrt(((values - mean) ** 2).sum(axis=1).mean()))
    length = float(np.linalg.norm(mean))
    relative = absolute / length if length else inf if absolute else 0.0
    return Drift(absolute=absolute, relative=relative)


def mean_moved(before: Sequence[ArrayLike], after: Sequence[ArrayLike]) -> float:
    """How far averaging has moved the mean over all ranks, relative to its length; should be
    rounding."""
    means = [
        np.array([np.ravel(replica) for replica in replicas], dtype=np.float64).mean(axis=0)
        for replicas in (before, after)
    ]
    length = float(np.linalg.norm(means[0]))
    return float(np.linalg.norm(means[1] - means[0])) / (length or 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedDrift:
    """Variances: of the replicas between two steps, and of what they are after a step and before
    anything of it is averaged; both averaged over a period, and `worst` before averaging."""

    after: float
    before: float
    worst: float


def expected_drift(mixing: Mixing) -> ExpectedDrift:
    """Infinite if the table isn't connected."""
    if not mixing.is_connected:
        return ExpectedDrift(after=inf, before=inf, worst=inf)
    steps, noise = len(mixing.steps), 1 - 1 / mixing.size
    covariance = _stationary(mixing)
    apart = np.zeros(steps)
    for step, exchanges in enumerate(mixing.steps):
        at_once = mixing.only([e for e in exchanges if not e.delay])
        before = _averaged(at_once, 0, covariance + _noise(mixing.size))
        covariance = _averaged(mixing, step, covariance + _noise(mixing.size))
        apart[step] += np.trace(covariance)
        for exchange in exchanges:
            own = np.diagonal(before - covariance)[exchange.places].sum()
            for later in range(exchange.delay):
                apart[(step + later) % steps] += own
    apart /= mixing.size
    after = float(apart.mean())
    return ExpectedDrift(after=after, before=after + noise, worst=float(apart.max()) + noise)


def _stationary(mixing: Mixing) -> Matrix:
    """A after the last step of a period."""
    own = np.zeros((mixing.size, mixing.size))  # what one period's noise leaves
    product = _noise(mixing.size)
    for step in range(len(mixing.steps)):
        own = _averaged(mixing, step, own + _noise(mixing.size))
        product = mixing.mixed(step, product)
        product -= product.mean(axis=0)
    for _ in range(DOUBLINGS):
        more = product @ own @ product.T
        own = own + more
        if np.trace(more) <= SETTLED * np.trace(own):
            break
        product = product @ product
    return own


def _averaged(mixing: Mixing, step: int, covariance: Matrix) -> Matrix:
    return mixing.mixed(step, mixing.mixed(step, covariance).T).T


def _noise(size: int) -> Matrix:
    """Of independent steps of variance one, less their mean."""
    return np.eye(size) - 1 / size

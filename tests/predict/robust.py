"""Fitting positive constants to measurements, some of which may be wrong, and none of which may say
much about some of the constants.

Constants are sought as logarithms, from a guess that says how far off it may be. Errors count by
Huber's rule: squared while small, and by their size beyond, so that no single one rules. Steps are
Levenberg's and Marquardt's, with derivatives by differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
NUDGE = 1e-4
MOST_STEPS = 80
GIVE_UP = 1e9  # of damping: no step helps any more


@dataclass(frozen=True, slots=True)
class Guess:
    """A constant before anything was measured; `within` is a standard deviation of its logarithm:
    0.7 says that it may well be half or twice as much."""

    value: float
    within: float


def fit_constants(
    errors: Callable[[Vector], Vector],
    guesses: Sequence[Guess],
    *,
    usual: float,
    trust: float,
) -> Vector:
    """The constants for which `errors`, a vector for given constants, are least. Beyond the `usual`
    size an error no longer counts squared; `trust` is how many errors of size 1 it would take to
    draw a constant one `within` away from its guess."""
    centre = np.log([guess.value for guess in guesses])
    width = np.array([guess.within for guess in guesses])

    def loss(place: Vector, found: Vector) -> float:
        size = np.abs(found)
        huber = np.where(size < usual, size**2 / 2, usual * (size - usual / 2))
        return float(huber.sum() + trust * (((place - centre) / width) ** 2).sum() / 2)

    place, damping = centre.copy(), 1.0
    found = errors(np.exp(place))
    least = loss(place, found)
    for _ in range(MOST_STEPS):
        slopes = _slopes(errors, place, found)
        weights = usual / np.maximum(np.abs(found), usual)
        bend = slopes.T @ (weights[:, None] * slopes) + np.diag(trust / width**2)
        down = slopes.T @ (weights * found) + trust * (place - centre) / width**2
        before = least
        while least == before and damping < GIVE_UP:
            tried = place - np.linalg.solve(bend + damping * np.diag(np.diag(bend)), down)
            there = errors(np.exp(tried))
            if loss(tried, there) < least:
                place, found, least = tried, there, loss(tried, there)
                damping = max(damping / 3, 1e-6)
            else:
                damping *= 4
        if before - least < 1e-6 * before:
            break
    return np.asarray(np.exp(place), np.float64)


def _slopes(errors: Callable[[Vector], Vector], place: Vector, found: Vector) -> Vector:
    slopes = np.empty((len(found), len(place)))
    for i in range(len(place)):
        nudged = place.copy()
        nudged[i] += NUDGE
        slopes[:, i] = (errors(np.exp(nudged)) - found) / NUDGE
    return slopes

"""Fitting constants that are known."""

from __future__ import annotations

import numpy as np
import pytest

from tests.predict.robust import Guess, Vector, fit_constants

SIZES = np.array([1.0, 10.0, 100.0, 1000.0, 10000.0])
SECONDS = 0.5 + SIZES / 200
GUESSES = [Guess(0.1, 2.0), Guess(50.0, 2.0)]


def errors(constants: Vector, seconds: Vector = SECONDS) -> Vector:
    latency, rate = constants
    found: Vector = np.log((latency + SIZES / rate) / seconds)
    return found


def test_constants_are_found() -> None:
    found = fit_constants(errors, GUESSES, usual=0.1, trust=1e-6)
    assert found == pytest.approx([0.5, 200], rel=1e-3)


def test_one_wrong_measurement_bends_little() -> None:
    wrong = SECONDS * [1, 1, 3, 1, 1]
    found = fit_constants(lambda c: errors(c, wrong), GUESSES, usual=0.01, trust=1e-6)
    assert found == pytest.approx([0.5, 200], rel=0.05)


def test_what_nothing_is_said_of_stays_as_guessed() -> None:
    guesses = [*GUESSES, Guess(7.0, 1.0)]
    found = fit_constants(lambda c: errors(c[:2]), guesses, usual=0.1, trust=1e-6)
    assert found[2] == pytest.approx(7.0)


def test_a_guess_that_is_trusted_stays() -> None:
    found = fit_constants(errors, GUESSES, usual=0.1, trust=1e6)
    assert found == pytest.approx([0.1, 50], rel=1e-3)

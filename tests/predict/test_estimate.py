"""A prediction beside its measurement."""

from __future__ import annotations

import pytest

from thalweg.predict import Outcome

OPEN = Outcome(sync="ring", predicted=1.1, low=1.0, high=1.2)


@pytest.mark.parametrize(
    ("measured", "error", "covered"),
    [(1.0, 0.1, True), (1.2, 1.1 / 1.2 - 1, True), (0.5, 1.2, False), (2.2, -0.5, False)],
)
def test_error_and_interval(measured: float, error: float, covered: bool) -> None:
    found = Outcome(sync="ring", predicted=1.1, low=1.0, high=1.2, measured=measured)
    assert found.error == pytest.approx(error)
    assert found.covered is covered
    assert str(found).startswith(f"{OPEN}, measured ")


def test_until_it_is_measured() -> None:
    assert (OPEN.error, OPEN.covered) == (0.0, False)
    assert str(OPEN) == "ring: predicted 1.1 s (1 s to 1.2 s)"

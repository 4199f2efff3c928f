"""torch's operations give what numpy's do."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compress.simulated import NUMPY_KERNELS
from thalweg.compress import Kernels
from thalweg.engine.arithmetic import TORCH_KERNELS

KERNELS: Kernels = TORCH_KERNELS
RANDOM = np.random.default_rng(0)
SPECIAL = np.array([0.0, -0.0, 1e-8, -1e-8, 65504.0, 7e4, -7e4, 3e38, np.inf, -np.inf], np.float32)


@pytest.mark.parametrize("kind", ["float16", "int16"])
def test_casts_are_the_same_bits(kind: str) -> None:
    values = np.concatenate([RANDOM.standard_normal(1001).astype(np.float32), SPECIAL])
    ours, numpys = np.empty(len(values), kind), np.empty(len(values), kind)
    KERNELS.narrow(values, ours)
    NUMPY_KERNELS.narrow(values, numpys)
    assert np.array_equal(ours.view(np.int16), numpys.view(np.int16))
    back, numpys_back = np.empty_like(values), np.empty_like(values)
    KERNELS.widen(ours, back)
    NUMPY_KERNELS.widen(ours, numpys_back)
    assert np.array_equal(back, numpys_back)


@pytest.mark.parametrize("kind", ["float16", "int16"])
def test_nan_stays_nan(kind: str) -> None:
    half, back = np.empty(1, kind), np.empty(1, np.float32)
    KERNELS.narrow(np.array([np.nan], np.float32), half)
    KERNELS.widen(half, back)
    assert np.isnan(back[0])


@pytest.mark.parametrize("turned", [False, True])
def test_products_into_views(turned: bool) -> None:
    """Of matrices that are views of longer vectors, transposed or not."""
    left = RANDOM.standard_normal(200).astype(np.float32)[:60]
    matrix = left.reshape(20, 3).T if turned else left.reshape(3, 20)
    right = RANDOM.standard_normal((20, 4)).astype(np.float32)
    place = np.zeros(40, np.float32)
    out = place[8:20].reshape(3, 4)
    KERNELS.product(matrix, right, out)
    assert np.allclose(out, matrix @ right, rtol=1e-5, atol=1e-6)
    KERNELS.product(matrix, right, out, subtract=True)
    assert np.allclose(out, 0, atol=1e-5)
    assert not place[:8].any()
    assert not place[20:].any()

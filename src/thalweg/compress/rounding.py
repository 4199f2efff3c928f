"""Stochastic rounding to whole levels: floor(x + u), u uniform in [0, 1), so that E = x.

The same as rounding |x| so and giving it its sign. u has 16 bits, and x is rounded to as many after
the point when they are added, so the expectation is right to 2^-17 of a level.
"""

from __future__ import annotations

import numpy as np
from numpy.random import BitGenerator

from thalweg.compress.codec import Array

ABOVE = np.uint32(0x43000000)  # float32's bits of 128: with k in the low bits, 128 + k / 2^16
SIGN = np.uint8(0x80)


class Rounding:
    """For up to `size` elements at once, which lie in [-127, 127]."""

    def __init__(self, size: int) -> None:
        self._shifts = np.empty(size, np.uint32)
        self._levels = np.empty(size, np.uint8)

    def levels(self, x: Array, random: BitGenerator) -> Array:
        """As int8, until the next call. `x` is overwritten."""
        shifts, levels = self._shifts[: x.size], self._levels[: x.size]
        drawn = random.random_raw(-(-x.size // 4)).view(np.uint16)[: x.size]
        np.bitwise_or(drawn, ABOVE, out=shifts)
        x += shifts.view(np.float32)
        levels[:] = x  # positive, so the cast is a floor
        levels ^= SIGN  # less 128
        return levels.view(np.int8)

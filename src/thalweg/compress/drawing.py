"""Which elements of a tensor are drawn at random, the same on all ranks (`seeds.generator`)."""

from __future__ import annotations

import numpy as np

from thalweg.compress.codec import Array


class Strata:
    """k distinct positions of n, without sorting or rejection: 0 .. n-1, as a circle that starts at
    a random place, is cut into k runs whose lengths differ by at most one, and each run gives one
    position. As the start is uniform, every position is drawn with probability k / n.
    """

    def __init__(self, n: int, k: int) -> None:
        bounds = np.arange(k + 1, dtype=np.int64) * n // k
        self._n = n
        self._starts = bounds[:-1]
        self._widths = np.diff(bounds).astype(np.uint64)

    def draw(self, source: np.random.Generator) -> Array:
        """Within a run by multiplying 32 random bits with its length and keeping what is above 32
        bits, which is even to 2^-32 of the length."""
        bits = source.integers(0, 1 << 32, len(self._starts), dtype=np.uint32)
        places = ((bits * self._widths) >> np.uint64(32)).view(np.int64)
        places += self._starts
        places += source.integers(self._n)
        places[places >= self._n] -= self._n
        return places

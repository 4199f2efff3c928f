"""MSTop-k (Shi et al., MLSys 2021): top-k by a binary search for the threshold, 8 k bytes.

The search halves [mean, max] of the magnitudes `samplings` times, and counts n(t) = |{a >= t}|:

    t1, the least t found with n(t) <= k;  t2, the greatest t found with n(t) > k

All of a >= t1 are sent, and, for exactly k, a run of those with t2 <= a < t1 from a random place.

Not every count is a pass over everything. From a sampled threshold on there are candidates, more
than k (`Selection`): above it n(t) is counted among them, and below it n(t) > k is known.
"""

from __future__ import annotations

import numpy as np

from thalweg.compress.codec import Array, Layout
from thalweg.compress.compressor import FEEDBACK, RATIO, WARMUP
from thalweg.compress.sparse import Sparse, sparsifier
from thalweg.declarations import Parameter


class MSTopK(Sparse):
    def __init__(self, *layout: *Layout, ratio: float, samplings: int) -> None:
        super().__init__(*layout, ratio=ratio)
        self._samplings = samplings

    def choose(self, values: Array, k: int, source: np.random.Generator) -> Array:
        everything = self.selection.magnitudes(values)
        mean, most = mean_and_most(everything)
        guessed = self.selection.candidates(values, k, source, 3.0)
        if guessed is None or len(guessed[0]) <= k:
            low, high = search(everything, 0.0, mean, most, k, self._samplings)
            return self._between(values, everything, low, high, k, source)
        places, least = guessed
        magnitudes = everything[places]
        low, high = search(magnitudes, least, mean, most, k, self._samplings)
        if low < least:
            return self._between(values, everything, low, high, k, source)
        return places[self._between(magnitudes, magnitudes, low, high, k, source)]

    def _between(
        self,
        values: Array,
        magnitudes: Array,
        low: np.float32,
        high: np.float32,
        k: int,
        source: np.random.Generator,
    ) -> Array:
        """All places from `high` on, and a run of those from `low` on, k in all."""
        above = self.selection.run(values, lambda a: a >= high, 0, k)
        missing = k - len(above)
        between = int(np.count_nonzero(magnitudes >= low)) - len(above)
        skip = int(source.integers(between - missing + 1))
        run = self.selection.run(values, lambda a: (a >= low) & (a < high), skip, missing)
        return np.concatenate((above, run))


def mean_and_most(magnitudes: Array) -> tuple[float, float]:
    most = float(magnitudes.max())
    with np.errstate(over="ignore"):
        return min(float(magnitudes.mean()), most), most


def search(
    magnitudes: Array, least: float, mean: float, most: float, k: int, samplings: int
) -> tuple[np.float32, np.float32]:
    """The thresholds t2 and t1. `magnitudes` are all those from `least` on, more than k if that
    isn't zero."""
    low, high = np.float32(0), np.float32(np.inf)
    left, right, found = 0.0, 1.0, 0
    for _ in range(samplings):
        middle = (left + right) / 2
        threshold = np.float32(mean + middle * (most - mean))
        count = int(np.count_nonzero(magnitudes >= threshold)) if threshold >= least else k + 1
        if count > k:
            left, low = middle, threshold
            continue
        right = middle
        if count > found:
            found, high = count, threshold
        if count == k:
            break
    return low, high


COMPRESSOR = sparsifier(
    name="mstopk",
    summary="top-k by a multi-sampling search for the threshold",
    codec=MSTopK,
    variants=("mstopk(ratio=0.05)",),
    parameters={
        "ratio": RATIO,
        "samplings": Parameter(kind=int, default=20, least=1, help="passes of the search"),
        "feedback": FEEDBACK,
        "warmup": WARMUP,
    },
)

"""Top-k: the k = ratio * d largest elements of each tensor, with their indices, 8 k bytes.

Indices differ between ranks, so payloads are gathered, not added. The k largest leave out the least
that k elements can: ||x - C(x)||^2 <= (1 - k/d) ||x||^2 (Stich et al., NeurIPS 2018).

Unless `exact`, a threshold from a sample may let up to 5 % fewer than k through (`Selection`).
"""

from __future__ import annotations

from math import ceil

import numpy as np

from thalweg.compress.codec import Array, Layout
from thalweg.compress.compressor import FEEDBACK, RATIO, WARMUP
from thalweg.compress.sparse import Sparse, sparsifier
from thalweg.declarations import Parameter


class TopK(Sparse):
    def __init__(self, *layout: *Layout, ratio: float, exact: bool) -> None:
        super().__init__(*layout, ratio=ratio)
        self._exact = exact

    def choose(self, values: Array, k: int, source: np.random.Generator) -> Array:
        if self._exact:
            return super().choose(values, k, source)
        return self.selection.largest(values, k, source, deviations=1.5, fewest=ceil(0.95 * k))


COMPRESSOR = sparsifier(
    name="topk",
    summary="the largest elements and their indices",
    codec=TopK,
    variants=("topk(ratio=0.05)",),
    parameters={
        "ratio": RATIO,
        "exact": Parameter(
            kind=bool, default=False, help="exactly k, not a threshold from a sample"
        ),
        "feedback": FEEDBACK,
        "warmup": WARMUP,
    },
)

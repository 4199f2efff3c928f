"""Deep gradient compression (Lin et al., ICLR 2018): top-k of the accumulated velocity, 8 k bytes.

u = m u + g, v = v + u; the largest elements of v are sent and cleared in both. The accumulation is
its error feedback, so there is no option for it. Exactly k are sent, found by a threshold from a
sample, as in the paper.

With momentum here, the optimizer must have none. The paper also clips each rank's gradient before
it is added, to the norm's limit / sqrt(ranks): that is the script's business, which has the
gradient first.
"""

from __future__ import annotations

import numpy as np

from thalweg.compress.codec import CODEC_CHUNK_ELEMENTS, Array, Layout
from thalweg.compress.compressor import RATIO, WARMUP
from thalweg.compress.kept import Combine, Kept
from thalweg.compress.sparse import Sparse, sparsifier
from thalweg.declarations import Parameter


class DGC(Sparse):
    """Top-k of the accumulation v, the residual; u is the state `velocity`."""

    def __init__(self, *layout: *Layout, ratio: float, momentum: float) -> None:
        super().__init__(*layout, ratio=ratio)
        self._momentum = np.float32(momentum)
        self._velocity = np.zeros(self.length, np.float32)
        views = {s.name: self._velocity[s.place] for s in self.segments}
        self.state = {"velocity": Kept(combine=Combine.SUM, arrays=views)}

    def accumulate(self, gradient: Array, residual: Array) -> None:
        for start in range(0, self.length, CODEC_CHUNK_ELEMENTS):
            place = slice(start, start + CODEC_CHUNK_ELEMENTS)
            velocity = self._velocity[place]
            velocity *= self._momentum
            velocity += gradient[place]
            residual[place] += velocity

    def clear(self, values: Array, sent: Array) -> None:
        """Clear the velocity, too, so that elements that were sent don't go on in the old direction
        (momentum factor masking)."""
        super().clear(values, sent)
        self._velocity[sent] = 0


COMPRESSOR = sparsifier(
    name="dgc",
    summary="top-k with momentum correction",
    codec=DGC,
    variants=("dgc(ratio=0.05, momentum=0)",),
    parameters={
        "ratio": RATIO,
        "momentum": Parameter(
            kind=float, default=0.9, least=0, most=1, help="momentum of the correction"
        ),
        "warmup": WARMUP,
    },
)

"""Error feedback: what a biased compressor leaves out is kept, and added to the next gradient.

    v = g + e;  send C(v);  e = v - C(v)        (Seide et al. 2014; Karimireddy et al., ICML 2019)

so that the sum of what was sent over all steps is the sum of all gradients less the last e, however
much C leaves out at each step. It composes with any codec: the residual is the vector that is
encoded, and the codec turns it into what is left.

Residuals are those of gradients divided by the number of ranks, so their sum over all ranks is what
the mean gradient still lacks, and keeps that meaning when the number of ranks changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thalweg.compress.arrangement import Segment
from thalweg.compress.buffers import aligned
from thalweg.compress.codec import Array, Codec
from thalweg.errors import NotFinite


class Feedback:
    """The residual of one bucket."""

    def __init__(self, codec: Codec) -> None:
        self.residual: Array = aligned(codec.length, np.float32)
        self.residual[:] = 0
        self._codec = codec

    def add(self, gradient: Array) -> Array:
        """What is to be encoded: this gradient, which is finite, and what was left out before."""
        self._codec.load_state(gradient, self.residual)
        return self.residual


def blame(segments: Sequence[Segment], values: Array) -> None:
    """NotFinite with the names of the tensors in which a value isn't finite; nothing if all are."""
    names = [s.name for s in segments if not np.isfinite(values[s.place]).all()]
    if names:
        raise NotFinite(names)

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

from thalweg.compress.aligned import aligned
from thalweg.compress.arrangement import Segment
from thalweg.compress.codec import Array, Codec
from thalweg.errors import NotFinite

AT_ONCE = 1 << 16  # elements: so many stay in the cache between two passes


class Feedback:
    """The residual of one bucket."""

    def __init__(self, codec: Codec) -> None:
        self.residual: Array = aligned(codec.length, np.float32)
        self.residual[:] = 0
        self._codec = codec

    def add(self, gradient: Array) -> Array:
        """What is to be encoded: this gradient, and what was left out before. NotFinite if the
        gradient is not, and then nothing has changed; unless the codec finds that out later."""
        if not self._codec.finds_not_finite:
            refuse_not_finite(self._codec.segments, gradient)
        self._codec.absorb(gradient, self.residual)
        return self.residual


def refuse_not_finite(segments: Sequence[Segment], values: Array) -> None:
    """One pass: a sum of squares is finite only if all values are (or overflows, and then a second
    pass decides)."""
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(values), AT_ONCE):
            part = values[start : start + AT_ONCE]
            if not np.isfinite(np.dot(part, part)):
                blame(segments, values)
                return


def blame(segments: Sequence[Segment], values: Array) -> None:
    """NotFinite with the names of the tensors in which a value isn't finite; nothing if all are."""
    names = [s.name for s in segments if not np.isfinite(values[s.place]).all()]
    if names:
        raise NotFinite(names)

"""TernGrad (Wen et al., NeurIPS 2017): sign(g) * Bernoulli(|g| / max|g|) in two bits.

d / 4 bytes and one scale per tensor. Gradients are clipped to 2.5 sigma first, as in the paper,
since a single large element would leave nearly all others zero: the expectation is the clipped
gradient, and the error of an element less than its max. Gradients centre on zero, so sigma is the
root of their mean square.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt

import numpy as np

from thalweg.compress.bit_packing import Rounding, WholeFractions
from thalweg.compress.codec import (
    CODEC_CHUNK_ELEMENTS,
    Array,
    Layout,
    ScaledCodec,
    pieces,
    raise_if_not_finite,
)
from thalweg.compress.compressor import WARMUP, Compressor, Payload, units
from thalweg.compress.generators import ENCODE_PURPOSE, random_bits
from thalweg.compress.int8 import MIN_BLOCK_SCALE
from thalweg.facts import Tensor

CLIP_DEVIATIONS = 2.5  # standard deviations
UNTHREADED_SUM_ELEMENTS = 1 << 13  # BLAS adds the squares of these in one thread


def sizes(tensors: Sequence[Tensor], step: int) -> list[Payload]:
    return [Payload("ternary digits", sum(units(t, 4) + 4 for t in tensors), 1)]


class TernGrad(ScaledCodec):
    per_byte = 4

    def __init__(self, *layout: *Layout) -> None:
        super().__init__(*layout)
        self._packing = WholeFractions(2)
        self._rounding = Rounding(CODEC_CHUNK_ELEMENTS)
        self._double = np.empty(UNTHREADED_SUM_ELEMENTS, np.float64)

    def encode(self, values: Array, payload: Array, step: int, rank: int, *, keep: bool) -> None:
        digits, scales = self.parts(payload)
        random = random_bits(self.segments, ENCODE_PURPOSE, step, rank)
        for number, (segment, extent) in enumerate(zip(self.segments, self.extents, strict=True)):
            scale = self._scale(values[segment.place])
            if not isfinite(scale):
                raise_if_not_finite(self.segments, values)
            scales[number] = scale
            factor = np.float32(1 / scale if scale else 0)
            for begin, end in pieces(*extent):
                x = np.multiply(values[begin:end], factor, out=self._scratch[: end - begin])
                np.clip(x, -1, 1, out=x)
                self._packing.pack(self._rounding.levels(x, random), digits[begin // 4 : end // 4])
        if keep:
            self._subtract(digits, scales, values)

    def _subtract(self, digits: Array, scales: Array, values: Array) -> None:
        for scale, extent in zip(scales, self.extents, strict=True):
            for begin, end in pieces(*extent):
                part = self._scratch[: end - begin]
                self.unpack(digits[begin // 4 : end // 4], scale, part)
                values[begin:end] -= part

    def unpack(self, packed: Array, scale: float, out: Array) -> None:
        self._packing.unpack(packed, out, scale)

    def _scale(self, values: Array) -> float:
        """The largest magnitude after clipping; 0 below 2^-119, where float32 has no inverse."""
        squares, largest = 0.0, np.float32(0)
        for begin, end in pieces(0, len(values), UNTHREADED_SUM_ELEMENTS):
            piece, double = values[begin:end], self._double[: end - begin]
            double[:] = piece
            squares += float(np.dot(double, double))
            magnitudes = np.abs(piece, out=self._scratch[: end - begin])
            largest = np.maximum(largest, magnitudes.max())
        scale = min(float(largest), CLIP_DEVIATIONS * sqrt(squares / len(values)))
        return 0.0 if scale < MIN_BLOCK_SCALE else scale


COMPRESSOR = Compressor(
    name="terngrad",
    summary="-1, 0 or 1 in two bits, unbiased",
    unit=lambda: 4,
    sizes=sizes,
    codec=TernGrad,
    summable=False,
    parameters={"warmup": WARMUP},
)

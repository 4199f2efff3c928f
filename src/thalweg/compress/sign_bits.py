"""Signs in one bit, set where the value isn't negative, for sign and EF-SignSGD.

A tensor v is encoded as a sign(v), a = mean|v|: of all multiples of its signs the one nearest to
it. The sign is that of the float's sign bit, so 0 is positive and -0 is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from thalweg.compress.arrangement import Segment
from thalweg.compress.codec import CODEC_CHUNK_ELEMENTS, Array, pieces, raise_if_not_finite

SIGN_BIT = np.uint32(0x80000000)
SIGN_WORD_ELEMENTS = 64  # one word of bits


class Signs:
    """The signs of vectors with these segments, each padded to whole bytes."""

    def __init__(self, segments: Sequence[Segment], extents: Sequence[tuple[int, int]]) -> None:
        self._segments = segments
        self._extents = extents
        self._flags = np.empty(CODEC_CHUNK_ELEMENTS, np.bool_)
        self._scratch = np.empty(CODEC_CHUNK_ELEMENTS, np.float32)
        self._ones = np.ones(CODEC_CHUNK_ELEMENTS, np.float32)
        every = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self.of_byte = every.astype(np.float32) * 2 - 1

    def encode(self, values: Array, packed: Array, means: Array) -> None:
        """Pack the signs, and set `means` to the mean magnitude of each segment; NotFinite if a
        value isn't finite."""
        for number, segment in enumerate(self._segments):
            total = 0.0
            for begin, end in pieces(*self._extents[number]):
                piece = values[begin:end]
                total += self._magnitude(piece)
                self.pack(piece, packed[begin // 8 : end // 8])
            if not isfinite(total):
                raise_if_not_finite(self._segments, values)
                total = float(np.abs(values[segment.place]).sum(dtype=np.float64))
            means[number] = total / segment.elements

    def _magnitude(self, piece: Array) -> float:
        """The sum of magnitudes; infinite if it is too large for a float32."""
        magnitudes = np.abs(piece, out=self._scratch[: len(piece)])
        with np.errstate(over="ignore"):
            return float(np.dot(magnitudes, self._ones[: len(piece)]))

    def pack(self, values: Array, packed: Array) -> None:
        """Pack the signs of at most CODEC_CHUNK_ELEMENTS elements."""
        flags = self._flags[: len(values)]
        np.greater_equal(values.view(np.int32), 0, out=flags)
        packed[:] = np.packbits(flags, bitorder="little")

    def unpack(self, packed: Array, scale: float, out: Array) -> None:
        """Set out to the signs in whole bytes, times the scale."""
        scaled = self.of_byte * np.float32(scale)
        np.take(scaled, packed, axis=0, out=out.reshape(-1, 8), mode="clip")

    def subtract(self, values: Array, scale: float) -> None:
        """Subtract scale * sign(values) from values, for a scale that isn't negative."""
        scale_bits = np.float32(scale).view(np.uint32)
        for begin, end in pieces(0, len(values)):
            piece, signed = values[begin:end], self._scratch[: end - begin]
            bits = signed.view(np.uint32)
            np.bitwise_and(piece.view(np.uint32), SIGN_BIT, out=bits)
            bits |= scale_bits
            piece -= signed

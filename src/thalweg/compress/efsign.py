"""EF-SignSGD (Karimireddy et al., ICML 2019): sign(g + e) times its mean magnitude, error fed back.

d / 8 bytes and one scale a tensor. The feedback is the method, so there is no switch for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thalweg.compress.buffers import CODEC_CHUNK_ELEMENTS, extents, pieces
from thalweg.compress.codec import Array, GatheredCodec, Layout
from thalweg.compress.compressor import WARMUP, Compressor, Payload, units
from thalweg.compress.sign_bits import SIGN_WORD_ELEMENTS, Signs, takes
from thalweg.facts import Tensor


def sizes(tensors: Sequence[Tensor], step: int) -> list[Payload]:
    return [
        Payload("signs and scales", sum(8 * units(t, SIGN_WORD_ELEMENTS) + 4 for t in tensors), 1)
    ]


class EFSign(GatheredCodec):
    """The payload is all bits, then all scales."""

    def __init__(self, *layout: *Layout) -> None:
        super().__init__(*layout)
        self._extents = extents(self.segments, self.length)
        self._signs = Signs(self.segments, self.length)
        self._scratch = np.empty(CODEC_CHUNK_ELEMENTS, np.float32)

    @property
    def nbytes(self) -> int:
        return self.length // 8 + 4 * len(self.segments)

    def encode(self, values: Array, payload: Array, step: int, rank: int, *, keep: bool) -> None:
        bits, scales = self._parts(payload)
        self._signs.encode(values, bits, scales)
        if keep:
            for segment, scale in zip(self.segments, scales, strict=True):
                self._signs.subtract(values[segment.place], scale)

    def add_up(self, payloads: Sequence[Array], out: Array) -> None:
        given = [self._parts(payload) for payload in payloads]
        for number, (segment, extent) in enumerate(zip(self.segments, self._extents, strict=True)):
            for begin, end in pieces(*extent):
                total, part = out[begin:end], self._scratch[: end - begin]
                for rank, (bits, scales) in enumerate(given):
                    packed = bits[begin // 8 : end // 8]
                    self._signs.unpack(packed, scales[number], part if rank else total)
                    if rank:
                        total += part
            out[segment.place.stop : extent[1]] = 0

    def _parts(self, payload: Array) -> tuple[Array, Array]:
        return payload[: self.length // 8], payload[self.length // 8 :].view("<f4")


COMPRESSOR = Compressor(
    name="efsign",
    summary="one bit an element and a scale, with error feedback",
    takes=takes,
    unit=lambda: SIGN_WORD_ELEMENTS,
    sizes=sizes,
    codec=EFSign,
    summable=False,
    biased=True,
    parameters={"warmup": WARMUP},
)

"""8-bit integers by blocks: q = round(g / s), s = max|g| / 127 of its block, d + 4 d / block bytes.

Scales differ between ranks, so payloads can't be added; a shard is decoded, added in float32 and
quantised once more for the all-gather (two-shot), never at each hop. Levels are rounded to nearest:
the error of an element is at most s / 2, each time.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.random import BitGenerator

from thalweg.compress.block_scaling import Blocks, block_quantizer, sizes
from thalweg.compress.codec import CODEC_CHUNK_ELEMENTS, Array, Layout
from thalweg.compress.compressor import WARMUP
from thalweg.declarations import Parameter


class Int8(Blocks):
    def __init__(self, *layout: *Layout, block: int) -> None:
        super().__init__(*layout, bits=8, block=block)
        self._whole = np.empty(max(CODEC_CHUNK_ELEMENTS, block), np.int8)

    def _rounded(self, x: Array, random: BitGenerator) -> Array:
        whole = self._whole[: x.size].reshape(x.shape)
        whole[...] = np.rint(x, out=x)
        return whole


COMPRESSOR = block_quantizer(
    name="int8",
    summary="one byte an element, scaled by blocks",
    sizes=partial(sizes, "bytes and scales"),
    codec=Int8,
    parameters={
        "block": Parameter(kind=int, default=256, least=1, help="elements that share a scale"),
        "warmup": WARMUP,
    },
)

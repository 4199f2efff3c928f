"""QSGD (Alistarh et al., NeurIPS 2017): stochastic rounding to levels, unbiased.

l = floor(s |g| / norm + u), u uniform in [0, 1), s = 2^(bits-1) - 1 levels and a sign:
d bits / 8 + 4 d / block bytes. The norm is the largest magnitude of the block, not the paper's
2-norm, under which nearly all elements would be at the lowest levels; so the error of an element is
less than norm / s.
"""

from __future__ import annotations

from functools import partial

from numpy.random import BitGenerator

from thalweg.compress.bit_packing import Rounding
from thalweg.compress.codec import CODEC_CHUNK_ELEMENTS, Array, Layout
from thalweg.compress.compressor import WARMUP
from thalweg.compress.int8 import Blocks, block_quantizer, block_sizes
from thalweg.declarations import Parameter


class QSGD(Blocks):
    """Stochastic rounding; reduced shards are rounded again with other random bits: unbiased,
    too."""

    def __init__(self, *layout: *Layout, bits: int, block: int) -> None:
        super().__init__(*layout, bits=bits, block=block)
        self._rounding = Rounding(max(CODEC_CHUNK_ELEMENTS, block))

    def _rounded(self, x: Array, random: BitGenerator) -> Array:
        return self._rounding.levels(x.reshape(-1), random).reshape(x.shape)


COMPRESSOR = block_quantizer(
    name="qsgd",
    summary="stochastic rounding to a few levels, unbiased",
    sizes=partial(block_sizes, "levels and norms"),
    codec=QSGD,
    parameters={
        "bits": Parameter(
            kind=int, default=8, least=2, most=8, help="bits of an element, with its sign"
        ),
        "block": Parameter(kind=int, default=512, least=1, help="elements that share a norm"),
        "warmup": WARMUP,
    },
)

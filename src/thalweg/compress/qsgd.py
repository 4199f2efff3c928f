"""QSGD (Alistarh et al., NeurIPS 2017): stochastic rounding to levels, unbiased.

l = floor(s |g| / norm + u), u uniform in [0, 1), s = 2^(bits-1) - 1 levels and a sign:
d bits / 8 + 4 d / block bytes. The norm is the largest magnitude of the block, not the paper's
2-norm, under which nearly all elements would be at the lowest levels; so the error of an element is
less than norm / s.
"""

from __future__ import annotations

from collections.abc import Sequence

from numpy.random import BitGenerator

from thalweg.compress.bit_packing import Rounding, packed_nbytes
from thalweg.compress.block_scaling import Blocks
from thalweg.compress.buffers import CODEC_CHUNK_ELEMENTS
from thalweg.compress.codec import Array, Layout
from thalweg.compress.compressor import WARMUP, Compressor, Payload, pays, units
from thalweg.declarations import Parameter
from thalweg.facts import Tensor


def takes(tensor: Tensor, bits: int, block: int) -> bool:
    return pays(tensor, units(tensor, block) * unit_nbytes(bits, block))


def sizes(tensors: Sequence[Tensor], step: int, bits: int, block: int) -> list[Payload]:
    blocks = sum(units(tensor, block) for tensor in tensors)
    return [Payload("levels and norms", blocks, unit_nbytes(bits, block))]


def unit_nbytes(bits: int, block: int) -> int:
    return packed_nbytes(bits, block) + 4


class QSGD(Blocks):
    """Rounded once more when a shard is reduced, with other random bits: unbiased again."""

    def __init__(self, *layout: *Layout, bits: int, block: int) -> None:
        super().__init__(*layout, bits=bits, block=block)
        self._rounding = Rounding(max(CODEC_CHUNK_ELEMENTS, block))

    def _rounded(self, x: Array, random: BitGenerator) -> Array:
        return self._rounding.levels(x.reshape(-1), random).reshape(x.shape)


COMPRESSOR = Compressor(
    name="qsgd",
    summary="stochastic rounding to a few levels, unbiased",
    takes=takes,
    unit=lambda bits, block: block,
    sizes=sizes,
    codec=QSGD,
    summable=False,
    elementwise=True,
    parameters={
        "bits": Parameter(
            kind=int, default=8, least=2, most=8, help="of an element, with its sign"
        ),
        "block": Parameter(kind=int, default=512, least=1, help="elements that share a norm"),
        "warmup": WARMUP,
    },
)

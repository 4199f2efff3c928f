"""QSGD (Alistarh et al., NeurIPS 2017): stochastic rounding to levels, unbiased.

l = floor(s |g| / norm + u), u uniform in [0, 1), s = 2^(bits-1) - 1 levels and a sign:
d bits / 8 + 4 d / block bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.codec import not_yet
from thalweg.compress.compressor import WARMUP, Compressor, Payload, pays, units
from thalweg.declarations import Parameter
from thalweg.facts import Tensor


def takes(tensor: Tensor, bits: int, block: int) -> bool:
    return pays(tensor, units(tensor, block) * unit_nbytes(bits, block))


def sizes(tensors: Sequence[Tensor], step: int, bits: int, block: int) -> list[Payload]:
    blocks = sum(units(tensor, block) for tensor in tensors)
    return [Payload("levels and norms", blocks, unit_nbytes(bits, block))]


def unit_nbytes(bits: int, block: int) -> int:
    return -(-block * bits // 8) + 4


COMPRESSOR = Compressor(
    name="qsgd",
    summary="stochastic rounding to a few levels, unbiased",
    takes=takes,
    unit=lambda bits, block: block,
    sizes=sizes,
    codec=not_yet,
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

"""QSGD (Alistarh et al., NeurIPS 2017): stochastic rounding to levels, unbiased.

l = floor(s |g| / norm + u), u uniform in [0, 1), s = 2^(bits-1) - 1 levels and a sign:
d bits / 8 + 4 d / block bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from thalweg.compress.compressor import Compressor, Payload, packed
from thalweg.declarations import Parameter
from thalweg.facts import Tensor


def payloads(tensors: Sequence[Tensor], step: int, bits: int, block: int) -> list[Payload]:
    return packed(
        "levels and norms",
        tensors,
        lambda t: ceil(t.elements * bits / 8) + 4 * ceil(t.elements / block),
    )


COMPRESSOR = Compressor(
    name="qsgd",
    summary="stochastic rounding to a few levels, unbiased",
    payloads=payloads,
    summable=False,
    elementwise=True,
    parameters={
        "bits": Parameter(
            kind=int, default=8, least=2, most=8, help="of an element, with its sign"
        ),
        "block": Parameter(kind=int, default=512, least=1, help="elements that share a norm"),
    },
)

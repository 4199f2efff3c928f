"""TernGrad (Wen et al., NeurIPS 2017): sign(g) * Bernoulli(|g| / max|g|) in two bits, unbiased.

d / 4 bytes and one scale a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from thalweg.compress.compressor import Compressor, Payload, packed
from thalweg.facts import Tensor


def payloads(tensors: Sequence[Tensor], step: int) -> list[Payload]:
    return packed("ternary digits", tensors, lambda t: ceil(t.elements / 4) + 4)


COMPRESSOR = Compressor(
    name="terngrad",
    summary="-1, 0 or 1 in two bits, unbiased",
    payloads=payloads,
    summable=False,
)

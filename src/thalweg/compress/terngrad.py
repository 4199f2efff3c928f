"""TernGrad (Wen et al., NeurIPS 2017): sign(g) * Bernoulli(|g| / max|g|) in two bits, unbiased.

d / 4 bytes and one scale a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.codec import not_yet
from thalweg.compress.compressor import WARMUP, Compressor, Payload, pays, units
from thalweg.facts import Tensor


def takes(tensor: Tensor) -> bool:
    return pays(tensor, units(tensor, 4) + 4)


def sizes(tensors: Sequence[Tensor], step: int) -> list[Payload]:
    return [Payload("ternary digits", sum(units(t, 4) + 4 for t in tensors), 1)]


COMPRESSOR = Compressor(
    name="terngrad",
    summary="-1, 0 or 1 in two bits, unbiased",
    takes=takes,
    unit=lambda: 4,
    sizes=sizes,
    codec=not_yet,
    summable=False,
    parameters={"warmup": WARMUP},
)

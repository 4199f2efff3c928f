"""EF-SignSGD (Karimireddy et al., ICML 2019): sign(g + e) times its mean magnitude, error fed back.

d / 8 bytes and one scale a tensor. The feedback is the method, so there is no switch for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from thalweg.compress.compressor import Compressor, Payload, packed
from thalweg.facts import Tensor


def payloads(tensors: Sequence[Tensor], step: int) -> list[Payload]:
    return packed("signs and scales", tensors, lambda t: ceil(t.elements / 8) + 4)


COMPRESSOR = Compressor(
    name="efsign",
    summary="one bit an element and a scale, with error feedback",
    payloads=payloads,
    summable=False,
    biased=True,
)

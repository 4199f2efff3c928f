"""bfloat16: 2 bytes an element, float32's range and 8 bits of it. Never overflows."""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.compressor import Compressor, Payload
from thalweg.facts import Tensor


def payloads(tensors: Sequence[Tensor], step: int) -> list[Payload]:
    return [Payload("bf16", sum(t.elements for t in tensors), 2)]


COMPRESSOR = Compressor(
    name="bf16",
    summary="bfloat16, added up on the way",
    payloads=payloads,
    summable=True,
    linear=True,
)

"""8-bit integers by blocks: q = round(g / s), s = max|g| / 127 of its block, d + 4 d / block bytes.

Scales differ between ranks, so payloads can't be added; a shard is decoded, added in float32 and
quantised once more for the way back (two-shot), never at each hop.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from thalweg.compress.compressor import Compressor, Payload, packed
from thalweg.declarations import Parameter
from thalweg.facts import Tensor


def payloads(tensors: Sequence[Tensor], step: int, block: int) -> list[Payload]:
    return packed("bytes and scales", tensors, lambda t: t.elements + 4 * ceil(t.elements / block))


COMPRESSOR = Compressor(
    name="int8",
    summary="one byte an element, scaled by blocks",
    payloads=payloads,
    summable=False,
    elementwise=True,
    parameters={
        "block": Parameter(kind=int, default=256, least=1, help="elements that share a scale")
    },
)

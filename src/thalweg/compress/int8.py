"""8-bit integers by blocks: q = round(g / s), s = max|g| / 127 of its block, d + 4 d / block bytes.

Scales differ between ranks, so payloads can't be added; a shard is decoded, added in float32 and
quantised once more for the way back (two-shot), never at each hop.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.codec import not_yet
from thalweg.compress.compressor import WARMUP, Compressor, Payload, pays, units
from thalweg.declarations import Parameter
from thalweg.facts import Tensor


def takes(tensor: Tensor, block: int) -> bool:
    return pays(tensor, units(tensor, block) * (block + 4))


def sizes(tensors: Sequence[Tensor], step: int, block: int) -> list[Payload]:
    return [Payload("bytes and scales", sum(units(t, block) for t in tensors), block + 4)]


COMPRESSOR = Compressor(
    name="int8",
    summary="one byte an element, scaled by blocks",
    takes=takes,
    unit=lambda block: block,
    sizes=sizes,
    codec=not_yet,
    summable=False,
    elementwise=True,
    parameters={
        "block": Parameter(kind=int, default=256, least=1, help="elements that share a scale"),
        "warmup": WARMUP,
    },
)

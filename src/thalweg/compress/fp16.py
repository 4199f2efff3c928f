"""Half precision: 2 bytes an element.

Divided by the number of ranks before it is cast, since the sum of large gradients would overflow.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.compressor import Compressor, Payload
from thalweg.facts import Tensor


def payloads(tensors: Sequence[Tensor], step: int) -> list[Payload]:
    return [Payload("fp16", sum(t.elements for t in tensors), 2)]


COMPRESSOR = Compressor(
    name="fp16",
    summary="half precision, added up on the way",
    payloads=payloads,
    summable=True,
    linear=True,
)

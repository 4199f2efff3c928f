"""Random block: one contiguous run of k = ratio * d elements of each tensor, from a shared seed.

As random-k, 4 k bytes, but encoding is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.compressor import (
    FEEDBACK,
    RATIO,
    Compressor,
    Payload,
    kept,
    packed,
)
from thalweg.facts import Tensor


def payloads(
    tensors: Sequence[Tensor], step: int, ratio: float, feedback: bool | None
) -> list[Payload]:
    return packed("values", tensors, lambda t: kept(t, ratio), itemsize=4)


COMPRESSOR = Compressor(
    name="randomblock",
    summary="the same random run of elements on all ranks, added up on the way",
    payloads=payloads,
    summable=True,
    linear=True,
    biased=True,
    in_step=True,
    parameters={"ratio": RATIO, "feedback": FEEDBACK},
)

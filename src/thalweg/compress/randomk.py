"""Random-k: k = ratio * d elements of each tensor, drawn from a seed that all ranks share.

All ranks send the same elements, so no indices travel and payloads are added: 4 k bytes.
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
    name="randomk",
    summary="the same random elements on all ranks, added up on the way",
    payloads=payloads,
    summable=True,
    linear=True,
    biased=True,
    in_step=True,
    parameters={"ratio": RATIO, "feedback": FEEDBACK},
)

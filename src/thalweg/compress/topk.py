"""Top-k: the k = ratio * d largest elements of each tensor, with their indices, 8 k bytes.

Indices differ between ranks, so payloads are gathered, not added.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.compressor import FEEDBACK, RATIO, Compressor, Payload, kept, packed
from thalweg.declarations import Parameter
from thalweg.facts import Tensor


def payloads(tensors: Sequence[Tensor], step: int, ratio: float, **_: object) -> list[Payload]:
    return packed("values and indices", tensors, lambda t: 8 * kept(t, ratio))


COMPRESSOR = Compressor(
    name="topk",
    summary="the largest elements and their indices",
    payloads=payloads,
    summable=False,
    biased=True,
    parameters={
        "ratio": RATIO,
        "exact": Parameter(
            kind=bool, default=False, help="exactly k, not a threshold from a sample"
        ),
        "feedback": FEEDBACK,
    },
)

"""Top-k: the k = ratio * d largest elements of each tensor, with their indices, 8 k bytes.

Indices differ between ranks, so payloads are gathered, not added.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.codec import not_yet
from thalweg.compress.compressor import FEEDBACK, RATIO, WARMUP, Compressor, Payload, kept, pays
from thalweg.declarations import Parameter
from thalweg.facts import Tensor


def takes(tensor: Tensor, ratio: float, exact: bool) -> bool:
    return pays(tensor, 8 * kept(tensor.elements, ratio))


def sizes(tensors: Sequence[Tensor], step: int, ratio: float, exact: bool) -> list[Payload]:
    k = sum(kept(tensor.elements, ratio) for tensor in tensors)
    return [Payload("values and indices", k, 8)]


COMPRESSOR = Compressor(
    name="topk",
    summary="the largest elements and their indices",
    takes=takes,
    sizes=sizes,
    codec=not_yet,
    summable=False,
    biased=True,
    parameters={
        "ratio": RATIO,
        "exact": Parameter(
            kind=bool, default=False, help="exactly k, not a threshold from a sample"
        ),
        "feedback": FEEDBACK,
        "warmup": WARMUP,
    },
)

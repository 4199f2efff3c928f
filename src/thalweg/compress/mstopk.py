"""MSTop-k (Shi et al., MLSys 2021): top-k by a binary search for the threshold, 8 k bytes.

The search takes `samplings` passes that count elements above a trial threshold between the mean
and the maximum; what is missing of k comes from a run of elements just below it.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.codec import not_yet
from thalweg.compress.compressor import FEEDBACK, RATIO, WARMUP, Compressor, Payload, kept, pays
from thalweg.declarations import Parameter
from thalweg.facts import Tensor


def takes(tensor: Tensor, ratio: float, samplings: int) -> bool:
    return pays(tensor, 8 * kept(tensor.elements, ratio))


def sizes(tensors: Sequence[Tensor], step: int, ratio: float, samplings: int) -> list[Payload]:
    k = sum(kept(tensor.elements, ratio) for tensor in tensors)
    return [Payload("values and indices", k, 8)]


COMPRESSOR = Compressor(
    name="mstopk",
    summary="top-k by a multi-sampling search for the threshold",
    takes=takes,
    sizes=sizes,
    codec=not_yet,
    summable=False,
    biased=True,
    parameters={
        "ratio": RATIO,
        "samplings": Parameter(kind=int, default=20, least=1, help="passes of the search"),
        "feedback": FEEDBACK,
        "warmup": WARMUP,
    },
)

"""MSTop-k (Shi et al., MLSys 2021): top-k by a binary search for the threshold, 8 k bytes.

The search takes `samplings` passes that count elements above a trial threshold between the mean
and the maximum; what is missing of k comes from a run of elements just below it.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.compressor import FEEDBACK, RATIO, Compressor, Payload, kept, packed
from thalweg.declarations import Parameter
from thalweg.facts import Tensor


def payloads(tensors: Sequence[Tensor], step: int, ratio: float, **_: object) -> list[Payload]:
    return packed("values and indices", tensors, lambda t: 8 * kept(t, ratio))


COMPRESSOR = Compressor(
    name="mstopk",
    summary="top-k by a multi-sampling search for the threshold",
    payloads=payloads,
    summable=False,
    biased=True,
    parameters={
        "ratio": RATIO,
        "samplings": Parameter(kind=int, default=20, least=1, help="passes of the search"),
        "feedback": FEEDBACK,
    },
)

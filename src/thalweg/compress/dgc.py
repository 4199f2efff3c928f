"""Deep gradient compression (Lin et al., ICLR 2018): top-k of the accumulated velocity, 8 k bytes.

u = m u + g, v = v + u; the largest elements of v are sent and cleared in both. The accumulation is
its error feedback, so there is no switch for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.compressor import RATIO, Compressor, Payload, kept, packed
from thalweg.declarations import Parameter
from thalweg.facts import Tensor


def payloads(tensors: Sequence[Tensor], step: int, ratio: float, **_: object) -> list[Payload]:
    return packed("values and indices", tensors, lambda t: 8 * kept(t, ratio))


COMPRESSOR = Compressor(
    name="dgc",
    summary="top-k with momentum correction",
    payloads=payloads,
    summable=False,
    biased=True,
    parameters={
        "ratio": RATIO,
        "momentum": Parameter(kind=float, default=0.9, least=0, most=1, help="of the correction"),
    },
)

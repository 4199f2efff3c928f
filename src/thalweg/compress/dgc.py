"""Deep gradient compression (Lin et al., ICLR 2018): top-k of the accumulated velocity, 8 k bytes.

u = m u + g, v = v + u; the largest elements of v are sent and cleared in both. The accumulation is
its error feedback, so there is no switch for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.codec import not_yet
from thalweg.compress.compressor import RATIO, WARMUP, Compressor, Payload, kept, pays
from thalweg.declarations import Parameter
from thalweg.facts import Tensor


def takes(tensor: Tensor, ratio: float, momentum: float) -> bool:
    return pays(tensor, 8 * kept(tensor.elements, ratio))


def sizes(tensors: Sequence[Tensor], step: int, ratio: float, momentum: float) -> list[Payload]:
    k = sum(kept(tensor.elements, ratio) for tensor in tensors)
    return [Payload("values and indices", k, 8)]


COMPRESSOR = Compressor(
    name="dgc",
    summary="top-k with momentum correction",
    takes=takes,
    sizes=sizes,
    codec=not_yet,
    summable=False,
    biased=True,
    parameters={
        "ratio": RATIO,
        "momentum": Parameter(kind=float, default=0.9, least=0, most=1, help="of the correction"),
        "warmup": WARMUP,
    },
)

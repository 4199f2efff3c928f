"""Random block: one contiguous run of k = ratio * d elements of each tensor, from a shared seed.

As random-k, 4 k bytes, but encoding is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.codec import not_yet
from thalweg.compress.compressor import FEEDBACK, RATIO, WARMUP, Compressor, Payload, kept, pays
from thalweg.facts import Tensor


def takes(tensor: Tensor, ratio: float) -> bool:
    return pays(tensor, 4 * kept(tensor.elements, ratio))


def sizes(tensors: Sequence[Tensor], step: int, ratio: float) -> list[Payload]:
    return [Payload("values", sum(kept(t.elements, ratio) for t in tensors), 4)]


COMPRESSOR = Compressor(
    name="randomblock",
    summary="the same random run of elements on all ranks, added up on the way",
    takes=takes,
    sizes=sizes,
    codec=not_yet,
    summable=True,
    linear=True,
    biased=True,
    in_step=True,
    parameters={"ratio": RATIO, "feedback": FEEDBACK, "warmup": WARMUP},
)

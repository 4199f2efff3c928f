"""Random-k: k = ratio * d elements of each tensor, drawn from a seed that all ranks share.

All ranks send the same elements, so no indices travel and payloads are added: 4 k bytes.
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
    name="randomk",
    summary="the same random elements on all ranks, added up on the way",
    takes=takes,
    sizes=sizes,
    codec=not_yet,
    summable=True,
    linear=True,
    biased=True,
    in_step=True,
    parameters={"ratio": RATIO, "feedback": FEEDBACK, "warmup": WARMUP},
)

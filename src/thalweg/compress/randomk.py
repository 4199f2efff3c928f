"""Random-k: k = ratio * d elements of each tensor, drawn from a seed that all ranks share.

All ranks send the same elements, so no indices travel and payloads are added: 4 k bytes. They are
drawn from strata (`drawing.py`), and not scaled up by 1 / ratio: a step moves a random share of the
coordinates as far as the mean gradient says. Without feedback E[C(x)] = ratio * x; with it, the
others move later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from thalweg.compress.arrangement import Segment
from thalweg.compress.codec import Array, Summed
from thalweg.compress.compressor import FEEDBACK, RATIO, WARMUP, Compressor, Payload, kept, pays
from thalweg.compress.drawing import Strata
from thalweg.compress.feedback import refuse_not_finite
from thalweg.compress.kernels import Kernels
from thalweg.compress.seeds import generator
from thalweg.facts import Tensor


def takes(tensor: Tensor, ratio: float) -> bool:
    return pays(tensor, 4 * kept(tensor.elements, ratio))


def sizes(tensors: Sequence[Tensor], step: int, ratio: float) -> list[Payload]:
    return [Payload("values", sum(kept(t.elements, ratio) for t in tensors), 4)]


class RandomK(Summed):
    def __init__(
        self, segments: Sequence[Segment], length: int, kernels: Kernels, ratio: float
    ) -> None:
        super().__init__(segments, length, kernels)
        counts = [kept(segment.elements, ratio) for segment in segments]
        self._strata = [Strata(s.elements, k) for s, k in zip(segments, counts, strict=True)]
        self._indices = np.empty(sum(counts), np.intp)
        self._payload = np.empty(sum(counts), np.float32)

    def rounds(self, values: Array, out: Array, step: int, *, keep: bool) -> Iterator[Array]:
        if not keep:
            refuse_not_finite(self.segments, values)
        indices, at = self._indices, 0
        for segment, strata in zip(self.segments, self._strata, strict=True):
            drawn = strata.draw(generator(step, segment.name))
            np.add(drawn, segment.start, out=indices[at : at + len(drawn)])
            at += len(drawn)
        self._payload[:] = values[indices]
        yield self._payload
        out[:] = 0
        out[indices] = self._payload
        if keep:
            values[indices] = 0


COMPRESSOR = Compressor(
    name="randomk",
    summary="the same random elements on all ranks, added up on the way",
    takes=takes,
    sizes=sizes,
    codec=RandomK,
    summable=True,
    linear=True,
    biased=True,
    in_step=True,
    parameters={"ratio": RATIO, "feedback": FEEDBACK, "warmup": WARMUP},
)

"""Random-k: k = ratio * d elements of each tensor, drawn from a seed that all ranks share.

All ranks send the same elements, so no indices are sent and payloads are added: 4 k bytes. They are
drawn from strata (`Strata`), and not scaled up by 1 / ratio: a step moves a random share of the
coordinates as far as the mean gradient says. Without feedback E[C(x)] = ratio * x; with it, the
others move later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from thalweg.compress.codec import Array, Layout, SummableCodec
from thalweg.compress.compressor import (
    FEEDBACK,
    RATIO,
    WARMUP,
    Compressor,
    Payload,
    kept_elements,
)
from thalweg.compress.generators import generator
from thalweg.facts import Tensor


class Strata:
    """k distinct positions of n, without sorting or rejection: 0 .. n-1, as a circle that starts at
    a random place, is cut into k runs whose lengths differ by at most one, and each run gives one
    position. As the start is uniform, every position is drawn with probability k / n.
    """

    def __init__(self, n: int, k: int) -> None:
        bounds = np.arange(k + 1, dtype=np.int64) * n // k
        self._n = n
        self._starts = bounds[:-1]
        self._widths = np.diff(bounds).astype(np.uint64)

    def draw(self, source: np.random.Generator) -> Array:
        """Draw one position of each run: 32 random bits times its length, shifted right by 32,
        which is uniform to 2^-32 of the length."""
        bits = source.integers(0, 1 << 32, len(self._starts), dtype=np.uint32)
        places = ((bits * self._widths) >> np.uint64(32)).view(np.int64)
        places += self._starts
        places += source.integers(self._n)
        places[places >= self._n] -= self._n
        return places


def sizes(tensors: Sequence[Tensor], step: int, ratio: float) -> list[Payload]:
    return [Payload("values", sum(kept_elements(t.elements, ratio) for t in tensors), 4)]


random_sparsifier = partial(
    Compressor,
    sizes=sizes,
    summable=True,
    linear=True,
    biased=True,
    in_step=True,
    parameters={"ratio": RATIO, "feedback": FEEDBACK, "warmup": WARMUP},
)


class RandomK(SummableCodec):
    def __init__(self, *layout: *Layout, ratio: float) -> None:
        super().__init__(*layout)
        counts = [kept_elements(segment.elements, ratio) for segment in self.segments]
        self._strata = [Strata(s.elements, k) for s, k in zip(self.segments, counts, strict=True)]
        self._indices = np.empty(sum(counts), np.intp)
        self._payload = np.empty(sum(counts), np.float32)

    def rounds(self, values: Array, out: Array, step: int, *, keep: bool) -> Iterator[Array]:
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


COMPRESSOR = random_sparsifier(
    name="randomk",
    summary="the same random elements on all ranks, summed in the all-reduce",
    codec=RandomK,
    variants=("randomk(ratio=0.5)",),
)

"""Random-k: k = ratio * d elements of each tensor, drawn from a seed that all ranks share.

All ranks send the same elements, so no indices are sent and payloads are added: 4 k bytes. They are
drawn from strata (`Strata`), and not scaled up by 1 / ratio: a step moves a random share of the
coordinates as far as the mean gradient says. Without feedback E[C(x)] = ratio * x; with it, the
others move later.
"""

from __future__ import annotations

from abc import abstractmethod
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


class SharedPlaces(SummableCodec):
    """A codec that sends the elements at places that are the same on all ranks, so the residual is
    `values` without them."""

    def __init__(self, *layout: *Layout, ratio: float) -> None:
        super().__init__(*layout)
        self.counts = [kept_elements(segment.elements, ratio) for segment in self.segments]
        self._payload = np.empty(sum(self.counts), np.float32)

    @abstractmethod
    def places(self, step: int) -> Iterator[tuple[slice, slice | Array]]:
        """The places of elements in the payload, each with theirs in the vector."""

    def rounds(self, values: Array, out: Array, step: int, *, keep: bool) -> Iterator[Array]:
        places = list(self.places(step))
        for sent, place in places:
            self._payload[sent] = values[place]
        yield self._payload
        out[:] = 0
        for sent, place in places:
            out[place] = self._payload[sent]
            if keep:
                values[place] = 0


class RandomK(SharedPlaces):
    def __init__(self, *layout: *Layout, ratio: float) -> None:
        super().__init__(*layout, ratio=ratio)
        elements = [segment.elements for segment in self.segments]
        self._strata = [Strata(n, k) for n, k in zip(elements, self.counts, strict=True)]
        self._indices = np.empty(sum(self.counts), np.intp)

    def places(self, step: int) -> Iterator[tuple[slice, Array]]:
        at = 0
        for segment, strata, k in zip(self.segments, self._strata, self.counts, strict=True):
            sent = slice(at, at + k)
            drawn = strata.draw(generator(step, segment.name))
            yield sent, np.add(drawn, segment.start, out=self._indices[sent])
            at += k


COMPRESSOR = random_sparsifier(
    name="randomk",
    summary="the same random elements on all ranks, summed in the all-reduce",
    codec=RandomK,
    variants=("randomk(ratio=0.5)",),
)

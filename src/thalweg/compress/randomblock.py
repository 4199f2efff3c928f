"""Random block: one contiguous run of k = ratio * d elements of each tensor, from a shared seed.

It sends 4 k bytes like random-k, but encoding is one copy. A run that starts near the end continues
at the beginning, so all elements are equally likely.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thalweg.compress.codec import Array, Layout, SummableCodec
from thalweg.compress.compressor import kept_elements
from thalweg.compress.generators import generator
from thalweg.compress.randomk import random_sparsifier


class RandomBlock(SummableCodec):
    def __init__(self, *layout: *Layout, ratio: float) -> None:
        super().__init__(*layout)
        self._counts = [kept_elements(segment.elements, ratio) for segment in self.segments]
        self._payload = np.empty(sum(self._counts), np.float32)

    def rounds(self, values: Array, out: Array, step: int, *, keep: bool) -> Iterator[Array]:
        places = self._places(step)
        for sent, place in places:
            self._payload[sent] = values[place]
        yield self._payload
        out[:] = 0
        for sent, place in places:
            out[place] = self._payload[sent]
            if keep:
                values[place] = 0

    def _places(self, step: int) -> list[tuple[slice, slice]]:
        """The slices of each run in the payload and the vector, up to the end and from the
        beginning."""
        places, at = [], 0
        for segment, k in zip(self.segments, self._counts, strict=True):
            first = int(generator(step, segment.name).integers(segment.elements))
            until_end = min(k, segment.elements - first)
            for start, count in ((first, until_end), (0, k - until_end)):
                begin = segment.start + start
                places.append((slice(at, at + count), slice(begin, begin + count)))
                at += count
        return places


COMPRESSOR = random_sparsifier(
    name="randomblock",
    summary="the same random run of elements on all ranks, summed in the all-reduce",
    codec=RandomBlock,
    variants=("randomblock(ratio=0.5)",),
)

"""Random block: one contiguous run of k = ratio * d elements of each tensor, from a shared seed.

It sends 4 k bytes like random-k, but encoding is one copy. A run that starts near the end continues
at the beginning, so all elements are equally likely.
"""

from __future__ import annotations

from collections.abc import Iterator

from thalweg.compress.generators import generator
from thalweg.compress.randomk import SharedPlaces, random_sparsifier


class RandomBlock(SharedPlaces):
    def places(self, step: int) -> Iterator[tuple[slice, slice]]:
        """The slices of each run in the payload and the vector, up to the end and from the
        beginning."""
        at = 0
        for segment, k in zip(self.segments, self.counts, strict=True):
            first = int(generator(step, segment.name).integers(segment.elements))
            until_end = min(k, segment.elements - first)
            for start, count in ((first, until_end), (0, k - until_end)):
                begin = segment.start + start
                yield slice(at, at + count), slice(begin, begin + count)
                at += count


COMPRESSOR = random_sparsifier(
    name="randomblock",
    summary="the same random run of elements on all ranks, summed in the all-reduce",
    codec=RandomBlock,
    variants=("randomblock(ratio=0.5)",),
)

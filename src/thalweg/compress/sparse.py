"""Payloads of values and their indices: 4 bytes for each of the k values of all tensors, then 4 for
each of their indices in the whole vector.

Where a codec chooses fewer than k, the payload is padded with zeros.

The elements of largest magnitude are found without sorting. A threshold t is estimated from a
sample, one element at random out of each run of w, so that no order of the elements misleads it:
about k / w of the sample belong to the k largest, give or take its square root. One pass finds the
candidates |v| >= t; if there are at least k, the k largest of them are the k largest of all. Where
there are too few, or far too many (ties), the k-th largest magnitude is found by a partition of
all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import sqrt

import numpy as np

from thalweg.compress.codec import CODEC_CHUNK_ELEMENTS, Array, GatheredCodec, Layout
from thalweg.compress.compressor import Compressor, Payload, kept_elements
from thalweg.compress.generators import generator
from thalweg.errors import WorkloadError
from thalweg.facts import Tensor

MAX_SAMPLE_STRIDE = 100  # a sample of 1 %
# Expected number of the k largest in a sample; with fewer its threshold is too inaccurate.
MIN_SAMPLED_TOPK_COUNT = 64

Wanted = Callable[[Array], Array]


class Selection:
    """Selects elements of vectors of at most `longest` elements; places are in ascending order."""

    def __init__(self, longest: int) -> None:
        self._magnitudes = np.empty(longest, np.float32)
        self._part = np.empty(CODEC_CHUNK_ELEMENTS, np.float32)

    def magnitudes(self, values: Array) -> Array:
        """The magnitudes, in a buffer that the next call overwrites."""
        return np.abs(values, out=self._magnitudes[: len(values)])

    def where(self, values: Array, wanted: Wanted) -> Iterator[Array]:
        """The places of elements with wanted magnitudes, part by part."""
        for start in range(0, len(values), CODEC_CHUNK_ELEMENTS):
            part = values[start : start + CODEC_CHUNK_ELEMENTS]
            places = np.flatnonzero(wanted(np.abs(part, out=self._part[: len(part)])))
            places += start
            yield places

    def run(self, values: Array, wanted: Wanted, skip: int, count: int) -> Array:
        """The places of `count` consecutive such elements, after the first `skip`."""
        found = [np.empty(0, np.intp)]
        for places in self.where(values, wanted):
            if not count:
                break
            taken = places[skip : skip + count]
            skip, count = max(0, skip - len(places)), count - len(taken)
            if len(taken):  # an empty view would keep its part alive
                found.append(taken)
        return np.concatenate(found)

    def candidates(
        self, values: Array, k: int, source: np.random.Generator, deviations: float
    ) -> tuple[Array, float] | None:
        """The places of all magnitudes from a threshold on, and the threshold, which is
        `deviations` standard deviations below the expected k-th largest. None if a sample is of no
        use."""
        width = min(MAX_SAMPLE_STRIDE, k // MIN_SAMPLED_TOPK_COUNT)
        if width < 4:
            return None
        sampled = len(values) // width
        drawn = np.arange(0, sampled * width, width) + source.integers(width, size=sampled)
        sample = np.abs(values[drawn])
        expected = k / width
        rank = min(sampled, round(expected + deviations * sqrt(expected)))
        sample.partition(sampled - rank)
        threshold = sample[sampled - rank]
        found, count = [], 0
        for places in self.where(values, lambda part: part >= threshold):
            found.append(places)
            count += len(places)
            if count > 2 * k:
                return None
        return np.concatenate(found), float(threshold)

    def largest(
        self,
        values: Array,
        k: int,
        source: np.random.Generator,
        *,
        deviations: float = 3.0,
        fewest: int | None = None,
    ) -> Array:
        """The places of the k largest; or of `fewest` to k candidates, if there are that many."""
        guessed = self.candidates(values, k, source, deviations)
        if guessed is not None:
            places, _ = guessed
            if len(places) >= k:
                return places[largest_of(np.abs(values[places]), k)]
            if fewest is not None and len(places) >= fewest:
                return places
        magnitudes = self.magnitudes(values)
        magnitudes.partition(len(values) - k)
        least = magnitudes[len(values) - k]
        above = self.run(values, lambda part: part > least, 0, k)
        ties = self.run(values, lambda part: part == least, 0, k - len(above))
        return np.concatenate((above, ties))


def largest_of(magnitudes: Array, k: int) -> Array:
    """A mask of exactly the k largest; of equal magnitudes, the first."""
    least = np.partition(magnitudes, len(magnitudes) - k)[len(magnitudes) - k]
    mask: Array = magnitudes > least
    ties = np.flatnonzero(magnitudes == least)
    mask[ties[: k - np.count_nonzero(mask)]] = True
    return mask


def sizes(tensors: Sequence[Tensor], step: int, ratio: float, **_: object) -> list[Payload]:
    k = sum(kept_elements(tensor.elements, ratio) for tensor in tensors)
    return [Payload("values and indices", k, 8)]


sparsifier = partial(Compressor, sizes=sizes, summable=False, biased=True)


class Sparse(GatheredCodec):
    """A codec that sends chosen elements exactly, so the residual is `values` without them."""

    def __init__(self, *layout: *Layout, ratio: float) -> None:
        super().__init__(*layout)
        if self.length > np.iinfo(np.int32).max:
            raise WorkloadError(
                f"{self.length:,} elements are in one bucket, too many for indices of 4 bytes",
                "use another compressor for a tensor of this size, or smaller buckets",
            )
        self._counts = [kept_elements(segment.elements, ratio) for segment in self.segments]
        self._chosen = np.empty(sum(self._counts), np.intp)
        self.nbytes = 8 * len(self._chosen)
        self.selection = Selection(max(segment.elements for segment in self.segments))

    def choose(self, values: Array, k: int, source: np.random.Generator) -> Array:
        """The places of at most k elements of a tensor: of exactly the k largest, by default."""
        return self.selection.largest(values, k, source)

    def encode(self, values: Array, payload: Array, step: int, rank: int, *, keep: bool) -> None:
        chosen, count = self._chosen, 0
        for segment, k in zip(self.segments, self._counts, strict=True):
            places = self.choose(values[segment.place], k, generator(step, segment.name))
            np.add(places, segment.start, out=chosen[count : count + len(places)])
            count += len(places)
        sent, indices = parts(payload)
        chosen[count:] = 0
        indices[:] = chosen
        sent[:] = values[chosen]
        sent[count:] = 0
        if keep:
            self.clear(values, chosen[:count])

    def clear(self, values: Array, sent: Array) -> None:
        values[sent] = 0

    def add_up(self, payloads: Sequence[Array], out: Array) -> None:
        out[:] = 0
        for payload in payloads:
            sent, indices = parts(payload)
            np.add.at(out, indices.astype(np.intp), sent)


def parts(payload: Array) -> tuple[Array, Array]:
    """The values and the indices in a payload of bytes."""
    middle = len(payload) // 2
    return payload[:middle].view(np.float32), payload[middle:].view(np.int32)

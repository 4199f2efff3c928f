"""A compressed bucket outside of rounds: under a code, and where the slowest are made up for later,
vectors are added on their way up a tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thalweg.compress import Summed
from thalweg.runtime import Arithmetic, arithmetic_of
from thalweg.training.compression import CompressedBucket, Compression
from thalweg.training.layout import FlatBucket, Layout
from thalweg.transports import Array


@dataclass(frozen=True, slots=True)
class Channel:
    """One vector of a step that is added up."""

    vector: Array
    arithmetic: Arithmetic


class Channels:
    """All vectors that the buckets of a layout travel in: each whole, or its payload and what goes
    as it is. Payloads must be linear, and take one round."""

    def __init__(self, layout: Layout, compression: Compression | None, rank: int) -> None:
        self.all: list[Channel] = []
        self._layout = layout
        self._compressed: dict[int, CompressedBucket] = {}
        self._under_way: dict[int, Iterator[Array]] = {}
        self._step = -1  # of those
        self._of: dict[int, list[int]] = {}
        for bucket in layout.buckets:
            if compression is not None:
                self._compressed[bucket.index] = CompressedBucket(bucket, compression, rank)
            vectors = self._vectors(bucket)
            first = len(self.all)
            self._of[bucket.index] = list(range(first, first + len(vectors)))
            self.all += vectors

    def contribution(self, bucket: FlatBucket, step: int) -> list[tuple[int, Array]]:
        """What this rank adds to which channel; copies."""
        self._encode(bucket, step)
        return [(number, self.all[number].vector.copy()) for number in self._of[bucket.index]]

    def finish(self, step: int) -> None:
        """The channels hold the step's result: put it into the buckets."""
        for index, payload in list(self._under_way.items()):
            for _ in payload:
                raise AssertionError("a linear codec has one round")
            self._compressed[index].store()
        self._under_way.clear()

    def open(self, step: int) -> None:
        """Make channels ready for a step's result, also those that this rank added nothing to."""
        if self._step != step:
            self._under_way.clear()  # of a step whose result never came
        for bucket in self._layout.buckets:
            if bucket.index not in self._under_way:
                self._encode(bucket, step)

    def _encode(self, bucket: FlatBucket, step: int) -> None:
        compressed = self._compressed.get(bucket.index)
        if compressed is None or not isinstance(compressed.codec, Summed):
            return
        values = compressed.load()
        payload = compressed.codec.rounds(values, values, step, keep=False)
        next(payload)
        self._step = step
        self._under_way[bucket.index] = payload

    def _vectors(self, bucket: FlatBucket) -> list[Channel]:
        compressed = self._compressed.get(bucket.index)
        rest = bucket.vector[bucket.arrangement.length :]
        exact = [Channel(rest, bucket.arithmetic)] if len(rest) else []
        if compressed is None or not isinstance(compressed.codec, Summed):
            return exact
        values = compressed.load()
        payload = next(compressed.codec.rounds(values, values, 0, keep=False))
        return [Channel(payload, arithmetic_of(compressed.carries)), *exact]

"""A compressed bucket outside of rounds: for plans in which everybody goes at its own pace.

Under a code, and where the slowest are made up for later, vectors are added on their way up a tree:
`Channels`. The server of `asp` gets each worker's gradients whole: `Parcels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from thalweg.compress import Codec, Gathered, Summed
from thalweg.errors import TransportError
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


class Parcels:
    """Each bucket of a layout as bytes, and back: [scales][payload][what goes as it is]."""

    def __init__(self, layout: Layout, compression: Compression, rank: int) -> None:
        self._rank = rank
        self._compressed = {
            bucket.index: CompressedBucket(bucket, compression, rank) for bucket in layout.buckets
        }

    def pack(self, bucket: FlatBucket, step: int) -> Array:
        compressed = self._compressed[bucket.index]
        codec = compressed.codec
        parts = [bucket.vector[bucket.arrangement.length :]]
        if codec is not None:
            out = compressed.load()
            values = compressed.to_encode(out)
            keep = values is not out
            payload = _encoded(codec, values, out, step, self._rank, keep=keep)
            parts = [*_scales(codec), payload, *parts]
            if isinstance(codec, Gathered) and keep:
                codec.settle(values, 1)
        return np.concatenate([part.view(np.uint8) for part in parts])

    def unpack(self, bucket: FlatBucket, parcel: Array) -> None:
        """Into the bucket; TransportError if it is another's."""
        compressed = self._compressed[bucket.index]
        codec = compressed.codec
        rest = bucket.vector[bucket.arrangement.length :]
        if codec is None:
            bucket.take(parcel)
            return
        out = compressed.load()
        payload: Array
        if isinstance(codec, Summed):
            out[:] = 0
            rounds = codec.rounds(out, out, 0, keep=False)
            payload = next(rounds)
        else:
            assert isinstance(codec, Gathered)
            payload = np.empty(codec.nbytes, np.uint8)
        _split(parcel.view(np.uint8), [*_scales(codec), payload, rest])
        if isinstance(codec, Summed):
            next(rounds, None)
        elif isinstance(codec, Gathered):
            codec.add_up([payload], out)
        compressed.store()


def _encoded(codec: Codec, values: Array, out: Array, step: int, rank: int, *, keep: bool) -> Array:
    if isinstance(codec, Summed):
        return next(codec.rounds(values, out, step, keep=keep))
    assert isinstance(codec, Gathered)
    payload = np.empty(codec.nbytes, np.uint8)
    codec.encode(values, payload, step, rank, keep=keep)
    return payload


def _scales(codec: Codec) -> list[Array]:
    if isinstance(codec, Gathered) and codec.scales is not None:
        return [codec.scales]
    return []


def _split(parcel: Array, parts: Sequence[Array]) -> None:
    expected = sum(part.nbytes for part in parts)
    if parcel.nbytes != expected:
        raise TransportError(
            f"a parcel of {parcel.nbytes} bytes came, and {expected} were expected",
            "give all ranks the same model and plan",
        )
    start = 0
    for part in parts:
        part.view(np.uint8)[:] = parcel[start : start + part.nbytes]
        start += part.nbytes

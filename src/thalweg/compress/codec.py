"""The working half of a compressor, for the compressed tensors of one bucket.

Made once and used at every step: buffers are its own, and nothing the size of a gradient is
allocated later. Vectors are float32 and finite, which who fills them has seen to; they are laid out
as the segments say, with zeros where a tensor is filled up to whole units.

A codec is one of three:

- `SummableCodec`: yields what is to be added over all ranks, one vector after the other, each of
  which the sum then replaces;
- `GatheredCodec`: every rank's payload reaches all ranks, which decode and add them;
- `ShardableCodec`: gathered too; or each rank reduces one shard of everybody's payload to a payload
  again, and the shards are gathered (two-shot).

What ranks contribute is divided by their number beforehand, so sums are means. `values` is what is
encoded, `out` where the result goes; both may be the same vector. With `keep`, `values` holds
afterwards what this rank's payload left out, for the next step (`feedback.py`): its sum with what
the payload stands for is what it was.

The state of a codec that has any is in `slots`: by kind, then by parameter, so that it survives
another layout of the buckets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from thalweg.compress.arrangement import Segment

Array = NDArray[Any]
CodecState = Mapping[str, Mapping[str, Array]]


class Kernels(Protocol):
    """The two operations that decide how fast a codec is: casts to half precision, and products of
    thin matrices. Half-precision arrays are float16, or int16 with the bits of bfloat16."""

    def narrow(self, source: Array, target: Array) -> None:
        """float32 to half precision, rounded to nearest."""

    def widen(self, source: Array, target: Array) -> None:
        """Half precision to float32."""

    def product(self, left: Array, right: Array, out: Array, *, subtract: bool = False) -> None:
        """out = left right, or out -= left right; float32 matrices."""


Layout = tuple[Sequence[Segment], int, Kernels]  # what all codecs are made for


class Codec:
    """`segments` are not empty, and of `length` elements with what fills them up."""

    def __init__(self, segments: Sequence[Segment], length: int, kernels: Kernels) -> None:
        self.segments = segments
        self.length = length
        self.kernels = kernels

    @property
    def state(self) -> CodecState:
        """What it keeps from step to step; may be written to."""
        return {}

    def load_state(self, gradient: Array, residual: Array) -> None:
        """Add a new gradient to what was left out so far, at once or when that is encoded."""
        residual += gradient


class SummableCodec(Codec, ABC):
    @abstractmethod
    def rounds(self, values: Array, out: Array, step: int, *, keep: bool) -> Iterator[Array]: ...


class GatheredCodec(Codec, ABC):
    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Of one payload."""

    @property
    def scales(self) -> Array | None:
        """What goes beside the payload and is added over all ranks: written by `encode`, read when
        payloads are decoded."""
        return None

    @abstractmethod
    def encode(self, values: Array, payload: Array, step: int, rank: int, *, keep: bool) -> None:
        """`payload` is of bytes; `rank` and `step` seed what is random in it."""

    def keep_residual(self, values: Array, ranks: int) -> None:
        """For a codec whose payload stands for something only once the scales of so many ranks are
        added up: leave in `values` what was left out."""

    @abstractmethod
    def add_up(self, payloads: Sequence[Array], out: Array) -> None:
        """out = the sum of what these payloads, of different ranks, stand for."""


class ShardableCodec(GatheredCodec):
    """`unit_nbytes` is what one unit of elements takes in the payload."""

    unit_nbytes: int

    @abstractmethod
    def reduce(
        self, shards: Sequence[Array], into: Array, first: int, step: int, rank: int
    ) -> None:
        """Write the sum of the same units, from unit `first` on, of different ranks' payloads, as
        a shard of a payload."""

    @abstractmethod
    def decode(self, payload: Array, out: Array) -> None:
        """What a payload made of such shards stands for."""

"""The codec of a compressor encodes and decodes the compressed tensors of one bucket.

It is made once and used at every step: buffers are its own, and nothing the size of a gradient is
allocated later. Vectors are float32, and their caller makes sure that they are finite. They are
laid out as the segments say, with zeros where a tensor is padded to whole units.

A codec is one of three:

- `SummableCodec`: yields vectors that are to be added over all ranks, one after the other, each of
  which the sum then replaces;
- `GatheredCodec`: every rank's payload reaches all ranks, which decode and add them;
- `ShardableCodec`: gathered too; or each rank reduces one shard of everybody's payload to a payload
  again, and the shards are gathered (two-shot).

Contributions are divided by the number of ranks beforehand, so sums are means. `values` is the
vector to encode, `out` the result; both may be the same vector. With `keep`, `values` holds the
residual of this rank's payload afterwards: what it held before, less the decoded payload.

The state of a codec that has any is in `state`: by kind, with a declaration of how it combines over
the ranks (`kept.py`), then by parameter, so that it survives another layout of the buckets.

Error feedback: the residual of a biased compressor is added to the next gradient,

    v = g + e;  send C(v);  e = v - C(v)        (Seide et al. 2014; Karimireddy et al., ICML 2019)

so that the sum of the decoded payloads of all steps is the sum of all gradients less the last e,
however much C leaves out at each step. It composes with any codec: the residual is the vector that
is encoded, and the codec turns it into what is left.

Residuals are those of gradients divided by the number of ranks, so their sum over all ranks is what
the mean gradient still lacks, and keeps that meaning when the number of ranks changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from thalweg.compress.arrangement import Segment
from thalweg.compress.kept import RESIDUAL_KIND, Combine, Kept
from thalweg.errors import NotFinite

Array = NDArray[Any]
CODEC_CHUNK_ELEMENTS = 1 << 16  # they stay in the cache between two passes
CACHE_LINE_BYTES = 64


class Kernels(Protocol):
    """The two operations that decide the speed of a codec: casts to half precision, and products
    of thin matrices. Half-precision arrays are float16, or int16 with the bits of bfloat16."""

    def narrow(self, source: Array, target: Array) -> None:
        """Cast float32 to half precision, rounded to nearest."""

    def widen(self, source: Array, target: Array) -> None:
        """Cast half precision to float32."""

    def product(self, left: Array, right: Array, out: Array, *, subtract: bool = False) -> None:
        """Set out = left right, or out -= left right, for float32 matrices."""


Layout = tuple[Sequence[Segment], int, Kernels]  # the first arguments of all codecs


class Codec:
    """A codec for `segments`, at least one, that have `length` elements with their padding;
    `extents` are the begin and end of each one with its padding. `state` has the arrays that it
    keeps from step to step, which may be written to."""

    def __init__(self, segments: Sequence[Segment], length: int, kernels: Kernels) -> None:
        self.segments = segments
        self.length = length
        self.kernels = kernels
        starts = [segment.start for segment in segments]
        self.extents = list(zip(starts, [*starts[1:], length], strict=True))
        self.state: Mapping[str, Kept] = {}

    def accumulate(self, gradient: Array, residual: Array) -> None:
        """Add a new gradient to the residual, at once or when the residual is encoded."""
        residual += gradient

    def clear_padding(self, out: Array) -> None:
        """Set the elements between the segments to zero."""
        for segment, (_, stop) in zip(self.segments, self.extents, strict=True):
            out[segment.place.stop : stop] = 0


class SummableCodec(Codec, ABC):
    @abstractmethod
    def rounds(self, values: Array, out: Array, step: int, *, keep: bool) -> Iterator[Array]: ...


class GatheredCodec(Codec, ABC):
    """A codec whose payloads have `nbytes` each. `scales`, if there are any, are added over all
    ranks beside the payload: written by `encode`, read when payloads are decoded."""

    nbytes: int
    scales: Array | None = None

    @abstractmethod
    def encode(self, values: Array, payload: Array, step: int, rank: int, *, keep: bool) -> None:
        """Write the payload, which is of bytes; `rank` and `step` seed what is random in it."""

    def keep_residual(self, values: Array, ranks: int) -> None:
        """Leave the residual in `values`, for a codec whose payload has a meaning only once the
        scales of all `ranks` are added up."""

    @abstractmethod
    def add_up(self, payloads: Sequence[Array], out: Array) -> None:
        """Set out to the sum of these payloads of different ranks, decoded."""


class ScaledCodec(GatheredCodec):
    """A gathered codec whose payload is all elements, `per_byte` in a byte, and then a float32
    scale for each tensor."""

    per_byte: int

    def __init__(self, *layout: *Layout) -> None:
        super().__init__(*layout)
        self.nbytes = self.length // self.per_byte + 4 * len(self.segments)
        self._scratch = np.empty(CODEC_CHUNK_ELEMENTS, np.float32)

    @abstractmethod
    def unpack(self, packed: Array, scale: float, out: Array) -> None:
        """Set out to the elements in these bytes, times the scale."""

    def parts(self, payload: Array) -> tuple[Array, Array]:
        """The bytes of the elements and the scales in a payload."""
        middle = self.length // self.per_byte
        return payload[:middle], payload[middle:].view("<f4")

    def add_up(self, payloads: Sequence[Array], out: Array) -> None:
        given = [self.parts(payload) for payload in payloads]
        for number, extent in enumerate(self.extents):
            for begin, end in pieces(*extent):
                total, part = out[begin:end], self._scratch[: end - begin]
                for rank, (elements, scales) in enumerate(given):
                    packed = elements[begin // self.per_byte : end // self.per_byte]
                    self.unpack(packed, scales[number], part if rank else total)
                    if rank:
                        total += part
        self.clear_padding(out)


class ShardableCodec(GatheredCodec):
    """A gathered codec whose payload can be cut between units of `unit_nbytes` each."""

    unit_nbytes: int

    @abstractmethod
    def reduce(
        self, shards: Sequence[Array], into: Array, first: int, step: int, rank: int
    ) -> None:
        """Write the sum of the same units of different ranks' payloads, from unit `first` on, as a
        shard of a payload."""

    @abstractmethod
    def decode(self, payload: Array, out: Array) -> None:
        """Decode a payload that is made of such shards."""


def pieces(start: int, stop: int, size: int = CODEC_CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """The begin and end of consecutive pieces of at most `size`."""
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)


def aligned(elements: int, kind: DTypeLike) -> Array:
    """An uninitialised vector that starts at a cache line, as torch's do: others take a fifth
    longer to copy."""
    nbytes = elements * np.dtype(kind).itemsize
    raw = np.empty(nbytes + CACHE_LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE_BYTES
    vector: Array = raw[start : start + nbytes].view(kind)
    return vector


class Feedback:
    """The residual of one bucket under error feedback; `state` has views of it by parameter."""

    def __init__(self, codec: Codec) -> None:
        self.residual: Array = aligned(codec.length, np.float32)
        self.residual[:] = 0
        self._codec = codec
        views = {s.name: self.residual[s.place] for s in codec.segments}
        self.state = {RESIDUAL_KIND: Kept(combine=Combine.SUM, arrays=views, residual=True)}

    def add(self, gradient: Array) -> Array:
        """The vector to encode: a gradient, which is finite, plus the residual."""
        self._codec.accumulate(gradient, self.residual)
        return self.residual


def raise_if_not_finite(segments: Sequence[Segment], values: Array) -> None:
    """Raise NotFinite with the names of the tensors in which a value isn't finite, if any."""
    names = [s.name for s in segments if not np.isfinite(values[s.place]).all()]
    if names:
        raise NotFinite(names)

"""Half precision: 2 bytes an element, 11 bits of it, at most 65,504.

Gradients are divided by the number of ranks before the cast, since the sum of large ones would
overflow, and rounded to nearest: the error of an element is at most 2^-11 of it, or 2^-25 below
2^-14.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from thalweg.compress.codec import Array, Layout, SummableCodec, aligned, raise_if_not_finite
from thalweg.compress.compressor import WARMUP, Compressor, Payload
from thalweg.errors import NotFinite
from thalweg.facts import Tensor

CAST_CHUNK_ELEMENTS = 1 << 18  # they stay in the cache between cast and check
HALF_TWO_BIT = np.uint16(0x4000)  # the bit that is set from 2 on, in both formats
HALF_TWO_BITS = np.uint64(0x4000400040004000)


def takes(tensor: Tensor) -> bool:
    """True for every tensor that isn't as small already, vectors too."""
    return tensor.itemsize > 2


def half_sizes(name: str, tensors: Sequence[Tensor], step: int) -> list[Payload]:
    return [Payload(name, sum(t.elements for t in tensors), 2)]


half_precision = partial(
    Compressor, takes=takes, summable=True, linear=True, parameters={"warmup": WARMUP}
)


class Half(SummableCodec):
    """A cast to `kind` and back. Its infinity has these bits; larger ones are nan."""

    def __init__(self, *layout: *Layout, kind: str, infinity: int) -> None:
        super().__init__(*layout)
        self._payload = aligned(self.length, kind)
        self._scratch = np.empty(CAST_CHUNK_ELEMENTS, np.float32)
        self._infinity = infinity

    def rounds(self, values: Array, out: Array, step: int, *, keep: bool) -> Iterator[Array]:
        for start in range(0, self.length, CAST_CHUNK_ELEMENTS):
            part = self._payload[start : start + CAST_CHUNK_ELEMENTS]
            self.kernels.narrow(values[start : start + CAST_CHUNK_ELEMENTS], part)
            if not _all_below_two(part) and self._has_infinity(part):
                self._raise_not_finite(values)
            if keep:
                self.kernels.widen(part, self._scratch[: len(part)])
                values[start : start + CAST_CHUNK_ELEMENTS] -= self._scratch[: len(part)]
        yield self._payload
        self.kernels.widen(self._payload, out)

    def _has_infinity(self, part: Array) -> bool:
        """True if an element is infinite or nan. Bits are in the order of magnitudes: positive ones
        are compared as signed numbers, negative ones as unsigned."""
        positive = part.view(np.int16).max() >= self._infinity
        return bool(positive or part.view(np.uint16).max() >= 0x8000 + self._infinity)

    def _raise_not_finite(self, values: Array) -> None:
        raise_if_not_finite(self.segments, values)
        largest = np.abs(values).max()
        names = [s.name for s in self.segments if np.abs(values[s.place]).max(initial=0) == largest]
        raise NotFinite(names, " in half precision (bf16 has float32's range)")


def _all_below_two(part: Array) -> bool:
    """True if all magnitudes are below two, as those of gradients are; compares four at once."""
    whole = len(part) // 4 * 4
    words, rest = part[:whole].view(np.uint64), part[whole:].view(np.uint16)
    return not (
        np.bitwise_or.reduce(words) & HALF_TWO_BITS or np.bitwise_or.reduce(rest) & HALF_TWO_BIT
    )


COMPRESSOR = half_precision(
    name="fp16",
    summary="half precision, summed in the all-reduce",
    sizes=partial(half_sizes, "fp16"),
    codec=partial(Half, kind="float16", infinity=0x7C00),
    carries="float16",
    largest=65504.0,
)

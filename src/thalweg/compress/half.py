"""What fp16 and bf16 have in common: a cast, added up on the way, and a cast back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from thalweg.compress.buffers import aligned
from thalweg.compress.codec import Array, Layout, SummableCodec
from thalweg.compress.compressor import Payload
from thalweg.compress.error_feedback import blame
from thalweg.errors import NotFinite
from thalweg.facts import Tensor

CAST_CHUNK_ELEMENTS = 1 << 18  # elements: so many stay in the cache between cast and check
HALF_TWO_BIT = np.uint16(0x4000)  # the bit that is set from 2 on, in both formats
HALF_TWO_BITS = np.uint64(0x4000400040004000)


def takes(tensor: Tensor) -> bool:
    """Everything that isn't as small already, vectors too."""
    return tensor.itemsize > 2


class Half(SummableCodec):
    """`infinity` is its bits; a larger value has no meaning, or means nan."""

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
                self._explain(values)
            if keep:
                self.kernels.widen(part, self._scratch[: len(part)])
                values[start : start + CAST_CHUNK_ELEMENTS] -= self._scratch[: len(part)]
        yield self._payload
        self.kernels.widen(self._payload, out)

    def _has_infinity(self, part: Array) -> bool:
        """By its bits, which are in order but for the sign: the largest of the positive ones as
        signed numbers, and of the negative ones as unsigned."""
        positive = part.view(np.int16).max() >= self._infinity
        return bool(positive or part.view(np.uint16).max() >= 0x8000 + self._infinity)

    def _explain(self, values: Array) -> None:
        blame(self.segments, values)
        largest = np.abs(values).max()
        names = [s.name for s in self.segments if np.abs(values[s.place]).max(initial=0) == largest]
        raise NotFinite(names, " in half precision (bf16 has float32's range)")


def _all_below_two(part: Array) -> bool:
    """As gradients are; at a glance, four at once."""
    whole = len(part) // 4 * 4
    words, rest = part[:whole].view(np.uint64), part[whole:].view(np.uint16)
    return not (
        np.bitwise_or.reduce(words) & HALF_TWO_BITS or np.bitwise_or.reduce(rest) & HALF_TWO_BIT
    )


def sizes(name: str, tensors: Sequence[Tensor]) -> list[Payload]:
    return [Payload(name, sum(t.elements for t in tensors), 2)]

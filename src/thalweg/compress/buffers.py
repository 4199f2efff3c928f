"""Vectors that begin with a cache line, and pieces of them that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from thalweg.compress.arrangement import Segment

CODEC_CHUNK_ELEMENTS = 1 << 16  # elements: so many stay in the cache between two passes
CACHE_LINE_BYTES = 64  # bytes


def pieces(start: int, stop: int, size: int = CODEC_CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Beginnings and ends, in order."""
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)


def extents(segments: Sequence[Segment], length: int) -> list[tuple[int, int]]:
    """Where each segment begins and ends, with what fills it up."""
    starts = [segment.start for segment in segments]
    return list(zip(starts, [*starts[1:], length], strict=True))


def aligned(elements: int, kind: DTypeLike) -> NDArray[Any]:
    """A vector of whatever is in memory there, at the start of a cache line, as torch's are: others
    take a fifth longer to copy."""
    nbytes = elements * np.dtype(kind).itemsize
    raw = np.empty(nbytes + CACHE_LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE_BYTES
    vector: NDArray[Any] = raw[start : start + nbytes].view(kind)
    return vector

"""Vectors that are aligned to cache lines, and pieces of them that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

CODEC_CHUNK_ELEMENTS = 1 << 16  # they stay in the cache between two passes
CACHE_LINE_BYTES = 64


def pieces(start: int, stop: int, size: int = CODEC_CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """The begin and end of consecutive pieces of at most `size`."""
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)


def aligned(elements: int, kind: DTypeLike) -> NDArray[Any]:
    """An uninitialised vector that starts at a cache line, as torch's do: others take a fifth
    longer to copy."""
    nbytes = elements * np.dtype(kind).itemsize
    raw = np.empty(nbytes + CACHE_LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE_BYTES
    vector: NDArray[Any] = raw[start : start + nbytes].view(kind)
    return vector

"""Vectors that begin with a cache line, as torch's do: others take a fifth longer to copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

LINE = 64  # bytes


def aligned(elements: int, kind: DTypeLike) -> NDArray[Any]:
    """Whatever is in memory there."""
    nbytes = elements * np.dtype(kind).itemsize
    raw = np.empty(nbytes + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    vector: NDArray[Any] = raw[start : start + nbytes].view(kind)
    return vector

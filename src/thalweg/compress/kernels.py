"""The two operations that decide how fast a codec is: casts to half precision, and products of thin
matrices. numpy's serve everywhere; who has torch brings faster ones.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Kernels(Protocol):
    """Half-precision arrays are float16, or int16 with the bits of bfloat16."""

    def narrow(self, source: Array, target: Array) -> None:
        """float32 to half precision, rounded to nearest."""

    def widen(self, source: Array, target: Array) -> None:
        """Half precision to float32."""

    def product(self, left: Array, right: Array, out: Array, *, subtract: bool = False) -> None:
        """out = left right, or out -= left right; float32 matrices."""


class NumpyKernels:
    def narrow(self, source: Array, target: Array) -> None:
        if target.dtype == np.float16:
            with np.errstate(over="ignore"):  # to infinity, which is found where it is looked for
                target[:] = source
            return
        bits = source.view(np.uint32)
        even = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
        rounded[np.isnan(source)] = 0x7FC0
        target[:] = rounded.astype(np.uint16).view(np.int16)

    def widen(self, source: Array, target: Array) -> None:
        if source.dtype == np.float16:
            target[:] = source
        else:
            bits = source.view(np.uint16).astype(np.uint32) << np.uint32(16)
            target[:] = bits.view(np.float32)

    def product(self, left: Array, right: Array, out: Array, *, subtract: bool = False) -> None:
        if subtract:
            out -= left @ right
        else:
            np.matmul(left, right, out=out)


NUMPY_KERNELS = NumpyKernels()

"""Codecs' costly operations by torch: casts that use the vector units, products of thin matrices
without a copy. Arrays stay numpy's; torch sees them in place.
"""

from __future__ import annotations

import numpy as np
import torch

from thalweg.compress.kernels import Array


class TorchKernels:
    """`thalweg.compress.Kernels`."""

    def narrow(self, source: Array, target: Array) -> None:
        _half(target).copy_(torch.from_numpy(source))

    def widen(self, source: Array, target: Array) -> None:
        torch.from_numpy(target).copy_(_half(source))

    def product(self, left: Array, right: Array, out: Array, *, subtract: bool = False) -> None:
        first, second, result = map(torch.from_numpy, (left, right, out))
        if subtract:
            result.addmm_(first, second, alpha=-1)
        else:
            torch.mm(first, second, out=result)


def _half(array: Array) -> torch.Tensor:
    """int16 stands for bfloat16, which numpy doesn't have."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.int16 else tensor


TORCH_KERNELS = TorchKernels()

"""Sums of received values, by numpy or, for two-byte floats, by torch; and torch kernels of codecs.

numpy has no bfloat16 and adds float16 one by one; torch does both well. Either one rounds a sum to
the element type at each addition, in the order of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from thalweg.transports import Array


class Arithmetic:
    """Arithmetic by numpy, in the type of the arrays."""

    def add(self, target: Array, incoming: Array) -> None:
        """Add `incoming` to `target`, in place."""
        target += incoming

    def weigh(self, target: Array, terms: Sequence[tuple[float, Array]], *, keep: bool) -> None:
        """Write the sum of weight x array, in this order, to `target`; `keep` adds it instead."""
        (weight, array), *rest = terms
        total = array * target.dtype.type(weight)
        for weight, array in rest:
            total += array if weight == 1 else array * target.dtype.type(weight)
        if keep:
            target += total
        else:
            target[:] = total


class TorchArithmetic(Arithmetic):
    """Arithmetic on arrays that hold the bits of `dtype`, whatever their numpy type is."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def add(self, target: Array, incoming: Array) -> None:
        self._tensor(target).add_(self._tensor(incoming))

    def weigh(self, target: Array, terms: Sequence[tuple[float, Array]], *, keep: bool) -> None:
        own = self._tensor(target)
        (weight, array), *rest = terms
        total = self._tensor(array) * weight
        for weight, array in rest:
            total.add_(self._tensor(array), alpha=weight)
        if keep:
            own.add_(total)
        else:
            own.copy_(total)

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array if array.flags.writeable else array.copy()).view(self._dtype)


NUMPY = Arithmetic()


def arithmetic_of(dtype: torch.dtype) -> Arithmetic:
    return TorchArithmetic(dtype) if dtype in (torch.bfloat16, torch.float16) else NUMPY


def as_array(tensor: torch.Tensor) -> Array:
    """A view of the tensor's memory for numpy; bfloat16, which numpy lacks, as int16."""
    bits = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    array: Array = bits.numpy()
    return array


class TorchKernels:
    """`thalweg.compress.Kernels` by torch: vectorised casts, and products of thin matrices without
    a copy. Torch works in place on numpy's arrays."""

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
    """A tensor on the array's memory; int16 stands for bfloat16, which numpy doesn't have."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.int16 else tensor


TORCH_KERNELS = TorchKernels()

"""What PowerSGD and ACP-SGD have in common: a matrix of n x m as two factors of n x r and m x r."""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.compressor import as_matrix, pays
from thalweg.facts import Tensor


def takes(tensor: Tensor, rank: int) -> bool:
    """Factors are float32."""
    if len(tensor.shape) < 2:
        return False
    rows, columns = as_matrix(tensor.shape)
    return pays(tensor, 4 * min(rank, rows, columns) * (rows + columns))


def factors(shapes: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    """Elements of all left and of all right factors."""
    left = right = 0
    for rows, columns in map(as_matrix, shapes):
        r = min(rank, rows, columns)
        left, right = left + r * rows, right + r * columns
    return left, right

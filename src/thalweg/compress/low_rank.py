"""What PowerSGD and ACP-SGD have in common: a matrix M of n x m as two factors, M ~ P Q^T, of n x r
and m x r.

Factors are stored transposed, r x n and r x m, and multiplied as P^T = Q^T M^T and Q^T = P^T M:
with few long rows, such a product takes a third of the time of M Q and M^T P.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from thalweg.compress.arrangement import Segment
from thalweg.compress.codec import Array, Summed
from thalweg.compress.compressor import as_matrix, pays
from thalweg.compress.drawing import generator
from thalweg.compress.feedback import blame
from thalweg.compress.kernels import Kernels
from thalweg.errors import NotFinite
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


class Factors:
    """One factor of each matrix, in one vector; zero until there is one."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        self.vector: Array = np.zeros(sum(map(prod, shapes.values())), np.float32)
        self.by_name: dict[str, Array] = {}
        start = 0
        for name, shape in shapes.items():
            end = start + prod(shape)
            self.by_name[name] = self.vector[start:end].reshape(shape)
            start = end

    def copy(self) -> Factors:
        other = Factors({name: matrix.shape for name, matrix in self.by_name.items()})
        other.vector[:] = self.vector
        return other

    @property
    def matrices(self) -> list[Array]:
        return list(self.by_name.values())

    def normalise(self, step: int) -> None:
        """Rows of unit length, so that products neither overflow nor vanish; where a row is zero,
        one from N(0, 1), the same on all ranks."""
        for name, matrix in self.by_name.items():
            largest = np.abs(matrix).max(axis=1)
            if not largest.all():
                drawn = generator(step, name).standard_normal(matrix.shape, np.float32)
                matrix[largest == 0] = drawn[largest == 0]
                largest = np.abs(matrix).max(axis=1)
            wide = matrix / largest[:, None].astype(np.float64)
            matrix[:] = wide / np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]


class LowRank(Summed):
    """`left` are the P^T of all matrices, `right` the Q^T."""

    def __init__(
        self, segments: Sequence[Segment], length: int, kernels: Kernels, rank: int
    ) -> None:
        super().__init__(segments, length, kernels)
        self._shapes = [as_matrix(segment.shape) for segment in segments]
        left, right = {}, {}
        for segment, (rows, columns) in zip(segments, self._shapes, strict=True):
            r = min(rank, rows, columns)
            left[segment.name], right[segment.name] = (r, rows), (r, columns)
        self.left, self.right = Factors(left), Factors(right)

    def project_left(self, values: Array) -> None:
        """P = M Q."""
        with np.errstate(over="ignore", invalid="ignore"):
            for matrix, left, right in self._together(values, self.left, self.right):
                self.kernels.product(right, matrix.T, left)
        self.refuse_not_finite(values, self.left)

    def project_right(self, values: Array) -> None:
        """Q = M^T P."""
        with np.errstate(over="ignore", invalid="ignore"):
            for matrix, left, right in self._together(values, self.left, self.right):
                self.kernels.product(left, matrix, right)
        self.refuse_not_finite(values, self.right)

    def multiply(
        self, left: Factors, right: Factors, out: Array, *, subtract: bool = False
    ) -> None:
        """out = P Q^T, or out -= P Q^T."""
        for matrix, p, q in self._together(out, left, right):
            self.kernels.product(p.T, q, matrix, subtract=subtract)

    def refuse_not_finite(self, values: Array, projected: Factors) -> None:
        """What isn't finite in M isn't so in its projection, which is far smaller."""
        if np.isfinite(projected.vector).all():
            return
        blame(self.segments, values)
        names = [
            name for name, factor in projected.by_name.items() if not np.isfinite(factor).all()
        ]
        raise NotFinite(names, " in its low-rank factors, which are sums of its elements")

    def _together(
        self, vector: Array, left: Factors, right: Factors
    ) -> Iterator[tuple[Array, Array, Array]]:
        """Each matrix in this vector, with its factors."""
        for segment, shape in zip(self.segments, self._shapes, strict=True):
            matrix = vector[segment.place].reshape(shape)
            yield matrix, left.by_name[segment.name], right.by_name[segment.name]

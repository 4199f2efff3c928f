"""PowerSGD (Vogels et al., NeurIPS 2019): a matrix M as P Q^T of low rank, by one power iteration.

P = M Q is added over the ranks and orthogonalised, then Q = M^T P is added: two rounds, r (n + m)
elements for a matrix of n x m. The factors of all matrices of a bucket travel together. Each step
starts from the last step's Q, so the iteration goes on from step to step.

With P orthonormal, the result P P^T M is a projection of the mean M: never longer than it. A rank
keeps its own projection's remainder, M_i - P P^T M_i, and not M_i - P Q^T as in the paper: over all
ranks these add up to the same, and its own doesn't grow where ranks' gradients differ.

Factors are stored transposed, r x n and r x m, and multiplied as P^T = Q^T M^T and Q^T = P^T M:
with few long rows, such a product is faster than M Q and M^T P (up to three times, at r = 4).

Rows are made orthonormal (the same space, and nothing in it counted twice) by Cholesky's factor of
their Gram matrix, in float64: with A A^T = L L^T, the rows of L^-1 A are orthonormal. The Gram
matrix is r x r, so this is one product of A with itself and one with L^-1. With rows of unit
length, and e added to the diagonal so that there is a factor in any case, the result is orthonormal
but for e L^-1 L^-T. Where that is much, as the rows are nearly dependent or zero, a QR
decomposition is used, which finds directions for them as well. These products are small, and made
without BLAS: with several workers on a machine, its threads compete for the cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod

import numpy as np

from thalweg.compress.codec import Array, Layout, SummableCodec, raise_if_not_finite
from thalweg.compress.compressor import FEEDBACK, RANK, WARMUP, Compressor, Payload, as_matrix
from thalweg.compress.generators import generator
from thalweg.compress.kept import Combine, Kept
from thalweg.errors import NotFinite
from thalweg.facts import Tensor

PRODUCT_CHUNK_ELEMENTS = 1 << 17  # half a megabyte
MIN_PRODUCT_ROWS = 16
MAX_THIN_FACTOR_ROWS = 8  # above this, M Q is faster untransposed
GRAM_REGULARIZATION_RATIO = 1e-12  # e
ORTHOGONALITY_TOLERANCE = 1e-6  # of e L^-1 L^-T


factorizer = partial(
    Compressor,
    summable=True,
    biased=True,
    in_step=True,
    parameters={"rank": RANK, "feedback": FEEDBACK, "warmup": WARMUP},
)


def factors(shapes: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    """The number of elements of all left and of all right factors."""
    left = right = 0
    for rows, columns in map(as_matrix, shapes):
        r = min(rank, rows, columns)
        left, right = left + r * rows, right + r * columns
    return left, right


class Factors:
    """One factor of each matrix, in one vector; zero at first."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        self.vector: Array = np.zeros(sum(map(prod, shapes.values())), np.float32)
        self.by_name: dict[str, Array] = {}
        start = 0
        for name, shape in shapes.items():
            end = start + prod(shape)
            self.by_name[name] = self.vector[start:end].reshape(shape)
            start = end
        self._lengths = np.repeat(
            [length for _, length in shapes.values()], [r for r, _ in shapes.values()]
        )
        self._rows = np.cumsum(self._lengths) - self._lengths

    def copy(self) -> Factors:
        other = Factors({name: matrix.shape for name, matrix in self.by_name.items()})
        other.vector[:] = self.vector
        return other

    @property
    def matrices(self) -> list[Array]:
        return list(self.by_name.values())

    def normalise(self, step: int) -> None:
        """Scale rows to a largest element of 1, so that products neither grow from step to step nor
        vanish; replace a zero row by one from N(0, 1), the same on all ranks."""
        largest = np.maximum.reduceat(np.abs(self.vector), self._rows)
        if not largest.all():
            for name, matrix in self.by_name.items():
                zero = ~matrix.any(axis=1)
                if zero.any():
                    drawn = generator(step, name).standard_normal(matrix.shape, np.float32)
                    matrix[zero] = drawn[zero]
            largest = np.maximum.reduceat(np.abs(self.vector), self._rows)
        self.vector /= np.repeat(largest, self._lengths)


class LowRank(SummableCodec):
    """A codec with the P^T of all matrices in `left` and the Q^T in `right`."""

    def __init__(self, *layout: *Layout, rank: int) -> None:
        super().__init__(*layout)
        self._shapes = [as_matrix(segment.shape) for segment in self.segments]
        left, right = {}, {}
        for segment, (rows, columns) in zip(self.segments, self._shapes, strict=True):
            r = min(rank, rows, columns)
            left[segment.name], right[segment.name] = (r, rows), (r, columns)
        self.left, self.right = Factors(left), Factors(right)

    def project_left(self, values: Array, new: Array | None = None) -> None:
        """Set P = M Q; add `new` to M first, part by part, each of which stays in the cache for
        both."""
        with np.errstate(over="ignore", invalid="ignore"):
            for segment, (matrix, left, right) in zip(
                self.segments, self._together(values, self.left, self.right), strict=True
            ):
                more = None if new is None else new[segment.place].reshape(matrix.shape)
                if len(right) <= MAX_THIN_FACTOR_ROWS:
                    self._project_thin(matrix, left, right, more)
                else:
                    if more is not None:
                        matrix += more
                    factor = np.empty((len(matrix), len(right)), np.float32)
                    self.kernels.product(matrix, right.T, factor)
                    left[:] = factor.T
        self.refuse_not_finite(values, self.left)

    def _project_thin(self, matrix: Array, left: Array, right: Array, new: Array | None) -> None:
        """Project as many rows of M at once as stay in the cache."""
        rows = max(MIN_PRODUCT_ROWS, PRODUCT_CHUNK_ELEMENTS // matrix.shape[1])
        for first in range(0, len(matrix), rows):
            part = slice(first, first + rows)
            if new is not None:
                matrix[part] += new[part]
            self.kernels.product(right, matrix[part].T, left[:, part])

    def project_right(self, values: Array) -> None:
        """Set Q = M^T P for all matrices."""
        with np.errstate(over="ignore", invalid="ignore"):
            for matrix, left, right in self._together(values, self.left, self.right):
                self.kernels.product(left, matrix, right)
        self.refuse_not_finite(values, self.right)

    def multiply(
        self, left: Factors, right: Factors, out: Array, *, subtract: bool = False
    ) -> None:
        """Set out = P Q^T, or out -= P Q^T."""
        for matrix, p, q in self._together(out, left, right):
            self.kernels.product(p.T, q, matrix, subtract=subtract)

    def refuse_not_finite(self, values: Array, projected: Factors) -> None:
        """Raise NotFinite if a projection isn't finite, and reset it: that is the case if M isn't
        finite, and the projection is far smaller to check."""
        if np.isfinite(projected.vector).all():
            return
        names = [
            name for name, factor in projected.by_name.items() if not np.isfinite(factor).all()
        ]
        projected.vector[:] = 0
        raise_if_not_finite(self.segments, values)
        raise NotFinite(names, " in its low-rank factors, which are sums of its elements")

    def _together(
        self, vector: Array, left: Factors, right: Factors
    ) -> Iterator[tuple[Array, Array, Array]]:
        """Pairs of a matrix in this vector and its two factors."""
        for segment, shape in zip(self.segments, self._shapes, strict=True):
            matrix = vector[segment.place].reshape(shape)
            yield matrix, left.by_name[segment.name], right.by_name[segment.name]


def orthonormalise(matrices: Sequence[Array]) -> None:
    """Make the rows of each matrix orthonormal, in place; no matrix has more rows than columns, and
    all are finite."""
    for rows in sorted({len(matrix) for matrix in matrices}):
        _orthonormalise_equal([matrix for matrix in matrices if len(matrix) == rows], rows)


def _orthonormalise_equal(matrices: Sequence[Array], rows: int) -> None:
    wide = [matrix.astype(np.float64) for matrix in matrices]
    gram = np.stack([np.einsum("in,jn->ij", matrix, matrix) for matrix in wide])
    lengths = np.sqrt(np.diagonal(gram, axis1=1, axis2=2))
    lengths = np.where(lengths > 0, lengths, 1.0)
    unit = gram / (lengths[:, :, None] * lengths[:, None, :])
    unit += GRAM_REGULARIZATION_RATIO * np.eye(rows)
    inverse = np.linalg.inv(np.linalg.cholesky(unit))
    errors = GRAM_REGULARIZATION_RATIO * (inverse * inverse).sum(axis=(1, 2))
    inverse /= lengths[:, None, :]
    for matrix, exact, transform, error in zip(matrices, wide, inverse, errors, strict=True):
        if error > ORTHOGONALITY_TOLERANCE:
            matrix[:] = np.linalg.qr(exact.T)[0].T
        else:
            matrix[:] = np.einsum("ij,jn->in", transform, exact)


def sizes(tensors: Sequence[Tensor], step: int, rank: int) -> list[Payload]:
    left, right = factors([tensor.shape for tensor in tensors], rank)
    return [Payload("P", left, 4), Payload("Q", right, 4)]


class PowerSGD(LowRank):
    def __init__(self, *layout: *Layout, rank: int) -> None:
        super().__init__(*layout, rank=rank)
        self.state = {"factor": Kept(combine=Combine.EQUAL, arrays=self.right.by_name)}
        self._new: Array | None = None

    def accumulate(self, gradient: Array, residual: Array) -> None:
        """Keep the gradient until P is computed from it."""
        self._new = gradient

    def rounds(self, values: Array, out: Array, step: int, *, keep: bool) -> Iterator[Array]:
        self.right.normalise(step)
        new, self._new = self._new, None
        self.project_left(values, new)
        yield self.left.vector
        self.refuse_not_finite(values, self.left)
        orthonormalise(self.left.matrices)
        self.project_right(values)
        own = self.right.copy()
        yield self.right.vector
        self.refuse_not_finite(values, self.right)
        self.multiply(self.left, self.right, out)
        if keep:
            self.multiply(self.left, own, values, subtract=True)


COMPRESSOR = factorizer(
    name="powersgd",
    summary="low-rank factors, summed in two all-reduce rounds",
    sizes=sizes,
    codec=PowerSGD,
    variants=("powersgd(rank=4, warmup=30)",),
)

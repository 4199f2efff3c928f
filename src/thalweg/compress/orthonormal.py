"""Rows made orthonormal: the same space, and nothing in it counted twice.

By Cholesky's factor of their Gram matrix, in float64: with A A^T = L L^T, the rows of L^-1 A are
orthonormal. The Gram matrix is r x r, so this is one product of A with itself and one with L^-1.

With rows of unit length, and e added to the diagonal so that there is a factor in any case, the
result is orthonormal but for e L^-1 L^-T. Where that is much, as the rows are nearly dependent or
zero, a QR decomposition takes over, which finds directions for them as well.

Products here are small, and made without BLAS: with several workers on a machine, its threads
stand in each other's way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thalweg.compress.codec import Array

NUDGE = 1e-12  # e
TOLERANCE = 1e-6  # of e L^-1 L^-T


def orthonormalise(matrices: Sequence[Array]) -> None:
    """The rows of each, in place; no matrix has more rows than columns, and all are finite."""
    for rows in sorted({len(matrix) for matrix in matrices}):
        _alike([matrix for matrix in matrices if len(matrix) == rows], rows)


def _alike(matrices: Sequence[Array], rows: int) -> None:
    wide = [matrix.astype(np.float64) for matrix in matrices]
    gram = np.stack([np.einsum("in,jn->ij", matrix, matrix) for matrix in wide])
    lengths = np.sqrt(np.diagonal(gram, axis1=1, axis2=2))
    lengths = np.where(lengths > 0, lengths, 1.0)
    unit = gram / (lengths[:, :, None] * lengths[:, None, :]) + NUDGE * np.eye(rows)
    inverse = np.linalg.inv(np.linalg.cholesky(unit))
    errors = NUDGE * (inverse * inverse).sum(axis=(1, 2))
    inverse /= lengths[:, None, :]
    for matrix, exact, transform, error in zip(matrices, wide, inverse, errors, strict=True):
        if error > TOLERANCE:
            matrix[:] = np.linalg.qr(exact.T)[0].T
        else:
            matrix[:] = np.einsum("ij,jn->in", transform, exact)

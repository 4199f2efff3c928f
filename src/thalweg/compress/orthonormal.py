"""Rows made orthonormal: the same space, and nothing in it counted twice.

By Cholesky's factor of their Gram matrix, in float64: with A A^T = L L^T, the rows of L^-1 A are
orthonormal. The Gram matrix is r x r, so this is one product of A with itself and one with L^-1.

With rows of unit length, L_ii is how far row i is from the rows before it, and the result is
orthonormal to about 1e-16 / min(L_ii)^2. Where rows are nearly dependent, or zero, a QR
decomposition takes over, which finds directions for them as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thalweg.compress.codec import Array

NUDGE = 1e-12  # keeps the Gram matrix of dependent rows positive definite
DEPENDENT = 1e-3  # L_ii below this


def orthonormalise(matrices: Sequence[Array]) -> None:
    """The rows of each, in place; no matrix has more rows than columns, and all are finite."""
    for rows in sorted({len(matrix) for matrix in matrices}):
        _alike([matrix for matrix in matrices if len(matrix) == rows], rows)


def _alike(matrices: Sequence[Array], rows: int) -> None:
    wide = [matrix.astype(np.float64) for matrix in matrices]
    gram = np.stack([matrix @ matrix.T for matrix in wide])
    lengths = np.sqrt(np.diagonal(gram, axis1=1, axis2=2))
    lengths = np.where(lengths > 0, lengths, 1.0)
    unit = gram / (lengths[:, :, None] * lengths[:, None, :]) + NUDGE * np.eye(rows)
    lower = np.linalg.cholesky(unit)
    inverse = np.linalg.inv(lower) / lengths[:, None, :]
    distances = np.diagonal(lower, axis1=1, axis2=2).min(axis=1)
    for matrix, exact, transform, distance in zip(matrices, wide, inverse, distances, strict=True):
        if distance < DEPENDENT:
            matrix[:] = np.linalg.qr(exact.T)[0].T
        else:
            matrix[:] = transform @ exact

"""A digest of tensors that is cheap enough to be computed while training. It detects accidental
changes, not deliberate ones.

The bytes of a tensor are rows of 64 columns of 8 bytes; the rest, padded with zeros, is its last
row. With odd weights w and a multiplier M, modulo 2^64:

    sum(tensor) = sum over columns of w(column) (sum over full rows of x + 3 x(last row, column))
    digest      = mix(sum(t_n) + M sum(t_n-1) + M^2 sum(t_n-2) + ...)  of the tensors t_1 ... t_n

The factor 3 distinguishes a padded row from a full one with the same bytes, and M the order of
tensors. The mixer is that of splitmix64: without it digests of similar tensors would look alike.

Every change of a single element changes the digest. It doesn't detect that rows of a tensor have
changed places, nor changes in one column that cancel.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

DIGEST_COLUMNS = 64  # of eight bytes each
DIGEST_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, with irregular bits


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """The digest of these tensors in this order, as a signed 64-bit integer."""
    weights = np.arange(1, 2 * DIGEST_COLUMNS, 2, dtype=np.uint64) * DIGEST_MULTIPLIER
    total = np.zeros(1, np.uint64)
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        full_nbytes = len(values) // weights.nbytes * weights.nbytes  # of the full rows
        last = np.zeros(weights.nbytes, np.uint8)
        last[: len(values) - full_nbytes] = values[full_nbytes:]
        full_rows = values[:full_nbytes].view(np.uint64).reshape(-1, DIGEST_COLUMNS)
        total = (
            total * DIGEST_MULTIPLIER
            + (weights * (full_rows.sum(axis=0, dtype=np.uint64) + 3 * last.view(np.uint64))).sum()
        )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        total = (total ^ total >> np.uint64(shift)) * np.uint64(factor)
    return int(total.view(np.int64)[0])

"""A digest of tensors that is cheap enough to be computed while training. It depends on every bit
and on its column in a row of 512 bytes; it detects accidental changes, not deliberate ones.

    sum over rows and columns of w(column) x(row, column)  modulo 2^64, with odd weights w

The sum is then mixed (splitmix64), since sums of linear digests would look alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

DIGEST_COLUMNS = 64  # of eight bytes each
DIGEST_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # any odd number whose bits are mixed


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """The digest of these tensors in this order, as a signed 64-bit integer."""
    weights = np.arange(1, 2 * DIGEST_COLUMNS, 2, dtype=np.uint64) * DIGEST_MULTIPLIER
    found = np.zeros(1, np.uint64)
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        whole = len(values) // weights.nbytes * weights.nbytes
        last = np.zeros(weights.nbytes, np.uint8)
        last[: len(values) - whole] = values[whole:]
        columns = (
            values[:whole].view(np.uint64).reshape(-1, DIGEST_COLUMNS).sum(axis=0, dtype=np.uint64)
        )
        found = found * DIGEST_MULTIPLIER + (weights * (columns + 3 * last.view(np.uint64))).sum()
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        found = (found ^ found >> np.uint64(shift)) * np.uint64(factor)
    return int(found.view(np.int64)[0])

"""Random bits of a codec's own: the same for the same step, rank, purpose and tensors, on any
machine; nobody else's generator is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
from numpy.random import SFC64, BitGenerator

from thalweg.compress.arrangement import Segment

ENCODE, REDUCE = 1, 2  # purposes


def random_bits(
    segments: Sequence[Segment], purpose: int, step: int, rank: int, first: int = 0
) -> BitGenerator:
    """`first` is the unit from which on it is for."""
    names = crc32("\n".join(segment.name for segment in segments).encode())
    return SFC64(np.random.SeedSequence((purpose, step, rank, first, names)))

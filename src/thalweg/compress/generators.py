"""What is random in codecs: from generators of their own, so that a user's random state stays as it
is, and from the step and tensors' names, so that it is the same on any machine and nothing has to
be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
from numpy.random import SFC64, BitGenerator

from thalweg.compress.arrangement import Segment

ENCODE_PURPOSE, REDUCE_PURPOSE = 1, 2  # purposes


def random_bits(
    segments: Sequence[Segment], purpose: int, step: int, rank: int, first: int = 0
) -> BitGenerator:
    """Different on every rank. `first` is the unit from which on it is for."""
    names = crc32("\n".join(segment.name for segment in segments).encode())
    return SFC64(np.random.SeedSequence((purpose, step, rank, first, names)))


def generator(step: int, name: str) -> np.random.Generator:
    """The same on all ranks, however buckets are laid out."""
    return np.random.Generator(SFC64((step, crc32(name.encode()))))

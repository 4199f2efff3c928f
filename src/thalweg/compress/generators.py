"""Random numbers of codecs. They have their own generators, so that a user's random state stays as
it is; seeds are the step and the tensors' names, so that they are the same on any machine and
nothing has to be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
from numpy.random import SFC64, BitGenerator

from thalweg.compress.arrangement import Segment

ENCODE_PURPOSE, REDUCE_PURPOSE = 1, 2


def random_bits(
    segments: Sequence[Segment], purpose: int, step: int, rank: int, first: int = 0
) -> BitGenerator:
    """A generator that is different on every rank, for the units from `first` on."""
    names = crc32("\n".join(segment.name for segment in segments).encode())
    return SFC64(np.random.SeedSequence((purpose, step, rank, first, names)))


def generator(step: int, name: str) -> np.random.Generator:
    """A generator that is the same on all ranks, whatever the layout of the buckets."""
    return np.random.Generator(SFC64((step, crc32(name.encode()))))

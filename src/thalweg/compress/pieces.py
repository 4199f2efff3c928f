"""Vectors in pieces that stay in the cache from one pass to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thalweg.compress.arrangement import Segment
from thalweg.compress.feedback import AT_ONCE


def pieces(start: int, stop: int, size: int = AT_ONCE) -> Iterator[tuple[int, int]]:
    """Beginnings and ends, in order."""
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)


def extents(segments: Sequence[Segment], length: int) -> list[tuple[int, int]]:
    """Where each segment begins and ends, with what fills it up."""
    starts = [segment.start for segment in segments]
    return list(zip(starts, [*starts[1:], length], strict=True))

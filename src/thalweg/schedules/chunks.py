"""The number of pieces in which data is sent.

A pipeline of h hops that carries T seconds of data in k pieces, each hop costing the latency a,
takes (k + h - 1)(a + T/k). Its minimum lies at k = sqrt((h - 1) T / a): many pieces where the path
is long or the link slow, one where a message costs more than the data in it. Filling the pipeline
takes (h - 1)/k of the time that it carries data, so pieces beyond 50 (h - 1) gain less than 2 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from thalweg.schedules.group import Group
from thalweg.schedules.moves import Span

MAX_PIECES_PER_HOP = 50


def split(elements: int, parts: int) -> list[int]:
    """Near-equal sizes, the larger first; some are zero if there are fewer elements than parts."""
    size, larger = divmod(elements, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def singles(start: int, stop: int) -> list[Span]:
    """The spans of these chunks, one for each."""
    return [(chunk, chunk + 1) for chunk in range(start, stop)]


def in_pieces(parts: Sequence[int], count: int) -> tuple[list[int], list[list[Span]]]:
    """Cut each part into `count` chunks: the sizes of all, and the spans of each part."""
    sizes = [size for part in parts for size in split(part, count)]
    return sizes, [singles(i * count, (i + 1) * count) for i in range(len(parts))]


def pieces(group: Group, nbytes: int, hops: int, messages: int = 1) -> int:
    """The best number of pieces for `nbytes` over this many hops of the group's slowest link, if a
    hop takes this many messages one after the other; never pieces that take less time than the
    latency of their hop."""
    latency = group.longest_seconds() * messages
    transfer = nbytes / group.slowest_bytes_per_second()
    if hops <= 1 or nbytes <= 0:
        return 1
    if latency <= 0:  # the cost of a message is unknown: keep every hop busy, and no more
        return min(hops, nbytes)
    best = sqrt((hops - 1) * transfer / latency)
    return max(1, int(min(best, transfer / latency, MAX_PIECES_PER_HOP * (hops - 1))))

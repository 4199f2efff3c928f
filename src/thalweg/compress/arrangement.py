"""Where the tensors of a bucket lie: first those that are compressed, each in whole units, then
those that go as they are. What is compressed is therefore one vector, and so is the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from thalweg.compress.compressor import Compressor, own_arguments, units
from thalweg.declarations import Value
from thalweg.facts import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """A tensor's place in its vector, without what fills it up."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    compressed: tuple[Segment, ...]
    exact: tuple[Segment, ...]  # counted from the end of what is compressed
    length: int  # elements of what is compressed, filled up
    rest: int  # elements that go as they are

    @property
    def elements(self) -> int:
        return self.length + self.rest


def arrange(
    tensors: Sequence[Tensor],
    compressor: Compressor | None = None,
    arguments: Mapping[str, Value] | None = None,
) -> Arrangement:
    """Without a compressor, all as they are, in their order."""
    taken: list[Tensor] = []
    rest, unit = list(tensors), 1
    if compressor is not None:
        given = arguments or {}
        taken, rest = compressor.divide(tensors, **given)
        unit = compressor.unit(**own_arguments(given))
    compressed, length = _in_line(taken, unit)
    exact, left = _in_line(rest, 1)
    return Arrangement(compressed=compressed, exact=exact, length=length, rest=left)


def _in_line(tensors: Sequence[Tensor], unit: int) -> tuple[tuple[Segment, ...], int]:
    segments, start = [], 0
    for tensor in tensors:
        segments.append(Segment(tensor.name, tensor.shape, start))
        start += units(tensor, unit) * unit
    return tuple(segments), start

"""The places of a bucket's tensors: first the compressed ones, each in whole units, then the
uncompressed ones. Each of the two parts is therefore one vector.
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
    """The place of a tensor in its vector, without padding."""

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
    exact: tuple[Segment, ...]  # counted from the end of the compressed part
    length: int  # elements of the compressed part, with padding
    rest: int  # uncompressed elements

    @property
    def elements(self) -> int:
        return self.length + self.rest


def arrange(
    tensors: Sequence[Tensor],
    compressor: Compressor | None = None,
    arguments: Mapping[str, Value] | None = None,
) -> Arrangement:
    """Arrange the tensors of a bucket; without a compressor all are uncompressed, in their
    order."""
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

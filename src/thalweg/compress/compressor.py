"""What a compressor declares. A file in this folder holds a `COMPRESSOR`, and nothing else changes.

- *summable*: payloads of different ranks can be added on the way, so any topology carries them.
- *linear*: the payload of a weighted sum is the weighted sum of the payloads, so codes carry it.
- *biased*: what it leaves out must be kept and added next time (error feedback), or training
  drifts.
- *in step*: all ranks must encode the same step alike (a seed or factors that they share), so it
  can't mix with what comes late.
- *elementwise*: a shard of the vector can be decoded by itself, so two-shot exchange serves it.

`payloads(tensors, step, **arguments)` says what travels, for the tensors that it compresses, in
the order in which it travels; tensors for which that doesn't pay go along uncompressed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod

from thalweg.declarations import Parameter
from thalweg.facts import Tensor

SMALL = 1024  # elements; below this a tensor's own header and latency outweigh what is saved

RATIO = Parameter(kind=float, default=0.01, least=1e-6, most=1.0, help="share of elements kept")
RANK = Parameter(kind=int, default=4, least=1, help="of the approximation")
FEEDBACK = Parameter(kind=bool, default=None, help="keep what was left out; on where it is sound")


@dataclass(frozen=True, slots=True)
class Payload:
    """What one rank contributes to one round."""

    name: str
    elements: int
    itemsize: int
    exact: bool = False  # uncompressed tensors

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    name: str
    summary: str
    payloads: Callable[..., list[Payload]]
    summable: bool
    linear: bool = False
    biased: bool = False
    in_step: bool = False
    elementwise: bool = False
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


def uncompressed(tensors: Sequence[Tensor]) -> list[Payload]:
    """Tensors of one bucket, and so of one dtype, as they are."""
    elements = sum(t.elements for t in tensors)
    return [Payload("exact", elements, tensors[0].itemsize, exact=True)] if elements else []


def kept(tensor: Tensor, ratio: float) -> int:
    """How many elements a sparsifier sends of this tensor."""
    return max(1, ceil(tensor.elements * ratio))


def packed(
    name: str, tensors: Sequence[Tensor], size: Callable[[Tensor], int], itemsize: int = 1
) -> list[Payload]:
    """One payload for all tensors for which it saves bytes, `size` items for each."""
    items, rest = 0, []
    for tensor in tensors:
        if _large(tensor) and size(tensor) * itemsize < tensor.nbytes:
            items += size(tensor)
        else:
            rest.append(tensor)
    return [*([Payload(name, items, itemsize)] if items else []), *uncompressed(rest)]


def _large(tensor: Tensor) -> bool:
    """Vectors and small tensors stay as they are."""
    return len(tensor.shape) > 1 and tensor.elements >= SMALL


def as_matrix(tensor: Tensor) -> tuple[int, int]:
    """Rows and columns: the first dimension, and all others together."""
    return tensor.shape[0], prod(tensor.shape[1:])


def low_rank(tensors: Sequence[Tensor], rank: int) -> tuple[int, int, list[Tensor]]:
    """Elements of all left and of all right factors, which are float32, and the tensors whose
    factors would save nothing."""
    left, right, rest = 0, 0, []
    for tensor in tensors:
        rows, columns = as_matrix(tensor) if _large(tensor) else (0, 0)
        r = min(rank, rows, columns)
        if r and 4 * r * (rows + columns) < tensor.nbytes:
            left, right = left + r * rows, right + r * columns
        else:
            rest.append(tensor)
    return left, right, rest

"""The declaration of a compressor. A file in this folder, or an installed package's entry point,
holds a `COMPRESSOR`, and nothing else changes.

- *summable*: payloads of different ranks can be added on the way, so any topology carries them.
- *linear*: the payload of a weighted sum is the weighted sum of the payloads, so codes carry it.
- *biased*: its residual must be kept and added to the next gradient (error feedback), or training
  drifts.
- *in step*: all ranks must encode the same step alike (a seed or factors that they share), so it
  can't be mixed with stale contributions.
- *elementwise*: a shard of the vector can be decoded by itself, so two-shot exchange serves it.

`unit(**arguments)` is the number of elements that are encoded together: a tensor is padded to whole
units. `sizes(tensors, step, **arguments)` are the payloads for the tensors that it compresses, in
the order in which they are sent. Those are the tensors of which `takes(tensor, **arguments)` is
True; without it, the tensors whose payloads save bytes (`pays`). The others are sent uncompressed.
`codec(segments, length, kernels, **arguments)` encodes and decodes (`codec.py`).

Advice combines it with the arguments of `variants`, those that reached the accuracy of exact plans
(docs/which-compressor-do-i-need.md); None stands for default arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, prod
from typing import Any

from thalweg.declarations import Parameter, Value
from thalweg.facts import Tensor

# Below this a tensor's own header and latency outweigh the bytes saved.
MIN_COMPRESSED_ELEMENTS = 1024

RATIO = Parameter(kind=float, default=0.01, least=1e-6, most=1.0, help="share of elements kept")
RANK = Parameter(kind=int, default=4, least=1, help="rank of the approximation")
FEEDBACK = Parameter(kind=bool, default=None, help="error feedback; on where it is sound")
WARMUP = Parameter(kind=int, default=0, least=0, help="steps before compression starts")
RUN_ARGUMENTS = ("feedback", "warmup")  # for the run, not the codec


@dataclass(frozen=True, slots=True)
class Payload:
    """The contribution of one rank to one round."""

    name: str
    elements: int
    itemsize: int
    exact: bool = False  # uncompressed values, which any topology adds up

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    name: str
    summary: str
    sizes: Callable[..., list[Payload]]
    codec: Callable[..., Any]
    summable: bool
    takes: Callable[..., bool] | None = None
    unit: Callable[..., int] = lambda **_: 1
    linear: bool = False
    biased: bool = False
    in_step: bool = False
    elementwise: bool = False
    carries: str = "float32"  # the type of a summable payload's elements
    period: int = 1  # steps after which payloads repeat
    largest: float = inf  # magnitude that a payload can hold
    variants: tuple[str, ...] | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def payloads(self, tensors: Sequence[Tensor], step: int, **arguments: Value) -> list[Payload]:
        """The payloads for the tensors of one bucket, which has one dtype."""
        own = own_arguments(arguments)
        taken, rest = self.divide(tensors, **arguments)
        return [*(self.sizes(taken, step, **own) if taken else []), *uncompressed(rest)]

    def divide(
        self, tensors: Sequence[Tensor], **arguments: Value
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors to compress, and the ones to send uncompressed."""
        takes, own = self.takes or self._saves_bytes, own_arguments(arguments)
        taken = [tensor for tensor in tensors if takes(tensor, **own)]
        return taken, [tensor for tensor in tensors if tensor not in taken]

    def _saves_bytes(self, tensor: Tensor, **own: Value) -> bool:
        """True if the payloads of this tensor, over a period, are smaller than the tensor."""
        if len(tensor.shape) < 2:
            return False
        steps = range(self.period)
        payloads = (payload for step in steps for payload in self.sizes([tensor], step, **own))
        return pays(tensor, sum(payload.nbytes for payload in payloads))

    def keeps(self, arguments: Mapping[str, Value]) -> bool:
        """True if residuals are kept, where that is sound: not under a code, nor where parameters
        are averaged."""
        return self.biased and arguments.get("feedback") is not False


def own_arguments(arguments: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in arguments.items() if name not in RUN_ARGUMENTS}


def uncompressed(tensors: Sequence[Tensor]) -> list[Payload]:
    """The payload of uncompressed tensors of one bucket, and so of one dtype."""
    elements = sum(t.elements for t in tensors)
    return [Payload("exact", elements, tensors[0].itemsize, exact=True)] if elements else []


def kept_elements(elements: int, ratio: float) -> int:
    """The number of elements of a tensor that a sparsifier sends."""
    return max(1, ceil(elements * ratio))


def units(tensor: Tensor, unit: int) -> int:
    """The number of whole units that hold this tensor."""
    return -(-tensor.elements // unit)


def pays(tensor: Tensor, nbytes: int) -> bool:
    """True if this many bytes are less than the tensor's; never for vectors and small tensors."""
    return (
        len(tensor.shape) > 1
        and tensor.elements >= MIN_COMPRESSED_ELEMENTS
        and nbytes < tensor.nbytes
    )


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns: the first dimension, and all others together."""
    return shape[0], prod(shape[1:])

"""A description of a training job: its tensors, when their gradients are ready, its step costs.

Gradients travel in buckets. A bucket takes tensors in the order in which backward finishes them,
last layer first, keeps to one dtype, never cuts a tensor, and closes once it holds the limit.
The layout follows from shapes and limit alone, so it is the same at every step and on every rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from typing import Self

from thalweg.errors import WorkloadError
from thalweg.facts.units import Duration, Size

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
ASSUMED_MATRIX_COLUMNS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A parameter; `ready` is when its gradient is computed, from the start of backward."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    ready: Duration | None = None  # None: not measured

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise WorkloadError(
                f"tensor {self.name} has dtype {self.dtype!r}", f"use {', '.join(ITEM_BYTES)}"
            )

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The compute time of one step on one worker, without communication."""

    forward: Duration = Duration(0.0)
    backward: Duration = Duration(0.0)
    optimizer: Duration = Duration(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors that are sent together, and the second of backward at which all are ready."""

    index: int
    tensors: tuple[Tensor, ...]
    ready_seconds: float

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def itemsize(self) -> int:
        return self.tensors[0].itemsize

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training job: its tensors in the order of the model, first layer first, and its compute
    time."""

    name: str
    tensors: tuple[Tensor, ...]
    costs: Costs = Costs()
    trained_with: str = ""  # its optimizer, like adamw; empty if unknown

    def __post_init__(self) -> None:
        if not self.tensors:
            raise WorkloadError(f"workload {self.name} has no tensors", "add at least one")
        for name, times in Counter(tensor.name for tensor in self.tensors).items():
            if times > 1:
                raise WorkloadError(f"{times} tensors are called {name!r}", "rename them")

    @classmethod
    def of_size(cls, size: Size) -> Self:
        """A workload of this size in float32: matrices of 1024 columns and a vector of the rest."""
        elements = size.nbytes // ITEM_BYTES["float32"]
        if elements < 1:
            raise WorkloadError(f"{size} holds no float32", "give at least 4B")
        side = ASSUMED_MATRIX_COLUMNS
        rows, rest = divmod(elements, side)
        heights = [side] * (rows // side) + [rows % side] * (rows % side > 0)
        shapes: list[tuple[int, ...]] = [(height, side) for height in heights]
        shapes += [(rest,)] if rest else []
        return cls(
            name=str(size),
            tensors=tuple(Tensor(name=f"t{i}", shape=shape) for i, shape in enumerate(shapes)),
        )

    @property
    def nbytes(self) -> int:
        """The size of all gradients in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def in_float32(self) -> Workload:
        """The workload with float32 instead of types of two bytes, as parameters are averaged."""
        wide = (replace(t, dtype="float32") if t.itemsize == 2 else t for t in self.tensors)
        return replace(self, tensors=tuple(wide))

    def buckets(self, limit: Size) -> tuple[Bucket, ...]:
        """The buckets, last layer first; a bucket closes once it holds `limit`. The first tensor is
        in the last bucket."""
        if limit.nbytes < 1:
            raise WorkloadError(f"a bucket of {limit} holds nothing", "give a size like 25MB")
        ready = self.ready_seconds()
        closed: list[list[Tensor]] = []
        waiting: dict[str, list[Tensor]] = {}
        for tensor in reversed(self.tensors):
            waiting[tensor.dtype] = filling = waiting.pop(tensor.dtype, [])  # now the last
            filling.append(tensor)
            is_full = sum(t.nbytes for t in filling) >= limit.nbytes
            if is_full and tensor is not self.tensors[0]:
                closed.append(waiting.pop(tensor.dtype))
        return tuple(
            Bucket(
                index=index,
                tensors=tuple(tensors),
                ready_seconds=max(ready[tensor.name] for tensor in tensors),
            )
            for index, tensors in enumerate([*closed, *waiting.values()])
        )

    def ready_seconds(self) -> dict[str, float]:
        """The time at which each gradient is ready, measured, or as if backward spent its time in
        proportion to elements."""
        total = sum(tensor.elements for tensor in self.tensors) or 1
        done, ready = 0, {}
        for tensor in reversed(self.tensors):
            done += tensor.elements
            assumed = self.costs.backward.seconds * done / total
            ready[tensor.name] = assumed if tensor.ready is None else tensor.ready.seconds
        return ready

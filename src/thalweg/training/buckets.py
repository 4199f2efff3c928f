"""A model's tensors as flat buckets, one buffer each, made once.

The place of each tensor follows from names, shapes, the bucket size (`facts.Workload`) and the
compressor (`compress.arrange`) alone, so it is the same on every rank and at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from thalweg.compress import Arrangement, arrange
from thalweg.engine.arithmetic import Arithmetic, arithmetic_of, as_array
from thalweg.errors import TransportError, WorkloadError
from thalweg.facts import Bucket, Size, Tensor, Workload
from thalweg.facts.workload import ITEM_BYTES
from thalweg.transports import Array

DTYPES = {getattr(torch, name): name for name in ITEM_BYTES}
Arrange = Callable[[Sequence[Tensor]], Arrangement]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBucket:
    """One bucket's buffer: a view of it for each tensor, and the array that is sent."""

    index: int
    arrangement: Arrangement
    flat: torch.Tensor
    views: Mapping[str, torch.Tensor]
    vector: Array
    arithmetic: Arithmetic

    def load(self, array: Array) -> None:
        """Replace the values by these, or by these bytes."""
        if array.nbytes != self.vector.nbytes:
            raise TransportError(
                f"{array.nbytes} bytes were received for bucket {self.index}, which has "
                f"{self.vector.nbytes}",
                "give all ranks the same model and plan",
            )
        self.vector[:] = array.view(self.vector.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The buckets of a model, and the workload that they form."""

    workload: Workload
    buckets: tuple[FlatBucket, ...]

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        limit: Size,
        arranged: Arrange = arrange,
        *,
        in_float32: bool = False,
    ) -> Layout:
        """The layout of these tensors; with `in_float32`, types of two bytes are sent as
        float32."""
        workload = Workload(name="model", tensors=tuple(_facts(tensors)))
        workload = workload.in_float32() if in_float32 else workload
        buckets = tuple(flat(b, tensors, arranged(b.tensors)) for b in workload.buckets(limit))
        return cls(workload=workload, buckets=buckets)


def _facts(tensors: Mapping[str, torch.Tensor]) -> Iterable[Tensor]:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise WorkloadError(
                f"parameter {name} is {str(tensor.dtype).removeprefix('torch.')}",
                f"Thalweg averages {', '.join(DTYPES.values())}: freeze or convert it",
            )
        yield Tensor(name=name, shape=tuple(tensor.shape), dtype=DTYPES[tensor.dtype])


def flat(
    bucket: Bucket, tensors: Mapping[str, torch.Tensor], arrangement: Arrangement
) -> FlatBucket:
    dtype: torch.dtype = getattr(torch, bucket.tensors[0].dtype)
    on_gpu = tensors[bucket.tensors[0].name].is_cuda
    buffer = torch.zeros(arrangement.elements, dtype=dtype, pin_memory=on_gpu)
    views = {s.name: buffer[s.place].view(s.shape) for s in arrangement.compressed}
    rest = buffer[arrangement.length :]
    views |= {s.name: rest[s.place].view(s.shape) for s in arrangement.exact}
    return FlatBucket(
        index=bucket.index,
        arrangement=arrangement,
        flat=buffer,
        views=views,
        vector=as_array(buffer),
        arithmetic=arithmetic_of(dtype),
    )


def scaled_into(view: torch.Tensor, tensor: torch.Tensor, factor: float) -> None:
    """Write factor x tensor into `view`; from a GPU, or another type, in two steps."""
    if tensor.device == view.device and tensor.dtype is view.dtype:
        torch.mul(tensor, factor, out=view)
    else:
        view.copy_(tensor)
        view.mul_(factor)

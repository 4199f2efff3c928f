"""A run's state in memory, for the transfer to a rank that is too far behind, or rejoins.

The format is that of a checkpoint: JSON, and the tensors as safetensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from thalweg.engine.collectives import BROADCAST_CHUNK_BYTES, Collectives
from thalweg.errors import RunError
from thalweg.training.data.position import BatchIndex
from thalweg.training.state_encoding import kinds_of, pack, places_for, unpack
from thalweg.transports import Array

PACKED_FIELDS = ("model", "optimizer", "objects", "held")  # of a snapshot; the rest is JSON
HEADER_LENGTH_STRUCT = struct.Struct("<Q")


class Stateful(Protocol):
    """A scheduler, a scaler, or another object whose state belongs to the training."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a rank before `step`."""

    step: int
    position: BatchIndex
    shared: int  # collectives before this step, so far
    agreed: int  # agreed changes, such as plans, up to this step
    ended: bool  # the training of this rank is over
    plan: str
    model: dict[str, Any]
    optimizer: dict[str, Any]
    objects: list[Any]
    held: dict[str, dict[str, torch.Tensor]]  # the compressor state that is equal on all ranks

    def in_parts(self) -> tuple[bytes, dict[str, torch.Tensor]]:
        """A JSON header, and the tensors themselves, none of them copied."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tree, tensors = pack({name: values.pop(name) for name in PACKED_FIELDS}, "state")
        values["position"] = astuple(self.position)
        head = {**values, "tree": tree, "tensors": kinds_of(tensors)}
        return json.dumps(head).encode(), tensors

    @classmethod
    def of_parts(cls, head: bytes, tensors: dict[str, torch.Tensor]) -> Snapshot:
        header = json.loads(head)
        tree, _ = header.pop("tree"), header.pop("tensors")
        epoch, batch = header.pop("position")
        numbers = [epoch, batch, *(header[name] for name in ("step", "shared", "agreed"))]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a count is missing")
        if type(header["ended"]) is not bool or type(header["plan"]) is not str:
            raise TypeError("the plan or the end is missing")
        position = BatchIndex(epoch=epoch, batch=batch)
        return cls(position=position, **header, **unpack(tree, tensors))

    def broadcast(self, collectives: Collectives, donor: int, *, overwrites: bool) -> Snapshot:
        """The snapshot of `donor`, which all ranks of `collectives` get; if `overwrites`, in the
        tensors of this one."""
        head, tensors = self.in_parts()
        length = torch.tensor([len(head)])
        collectives.broadcast(donor, [length])
        is_donor = collectives.rank == donor
        text = torch.frombuffer(bytearray(head if is_donor else int(length)), dtype=torch.uint8)
        collectives.broadcast(donor, [text])
        head = text.numpy().tobytes()
        if not is_donor:
            tensors = places_for(json.loads(head)["tensors"], tensors if overwrites else {})
        raw = (tensor.view(-1).view(torch.uint8) for tensor in tensors.values() if tensor.numel())
        chunks = (chunk for one in raw for chunk in torch.split(one, BROADCAST_CHUNK_BYTES.nbytes))
        collectives.broadcast(donor, chunks)
        return self if is_donor else Snapshot.of_parts(head, tensors)

    def in_bytes(self) -> Array:
        head, tensors = self.in_parts()
        return np.frombuffer(HEADER_LENGTH_STRUCT.pack(len(head)) + head + save(tensors), np.uint8)

    @classmethod
    def of_bytes(cls, array: Array) -> Snapshot:
        """The snapshot that `in_bytes` encoded; RunError if the bytes are something else."""
        try:
            return cls._read(array.tobytes())
        except (
            *(LookupError, RecursionError, TypeError, ValueError),
            *(SafetensorError, struct.error),
        ) as error:
            raise RunError(
                "the snapshot of the run that another rank sent can't be read "
                f"({str(error).partition(chr(10))[0]})",
                "start all workers with the same version of Thalweg, from the last checkpoint",
            ) from None

    @classmethod
    def _read(cls, data: bytes) -> Snapshot:
        (length,) = HEADER_LENGTH_STRUCT.unpack_from(data)
        head = data[HEADER_LENGTH_STRUCT.size : HEADER_LENGTH_STRUCT.size + length]
        return cls.of_parts(head, load(data[HEADER_LENGTH_STRUCT.size + length :]))

    def load_into(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, objects: Sequence[Stateful]
    ) -> None:
        """Load the snapshot, once: an optimizer keeps the tensors that it loads."""
        model.load_state_dict(self.model)
        optimizer.load_state_dict(self.optimizer)
        vars(optimizer)["_opt_called"] = True  # otherwise torch's schedulers warn
        for part, state in zip(objects, self.objects, strict=True):
            part.load_state_dict(state)

    def settings(
        self, optimizer: torch.optim.Optimizer, objects: Sequence[Stateful]
    ) -> Callable[[], None]:
        """A function that loads again what scripts change at the end of an epoch, and holds no more
        than that."""
        states, groups = self.objects, self.optimizer["param_groups"]

        def load() -> None:
            for own, group in zip(optimizer.param_groups, groups, strict=True):
                own.update({name: group[name] for name in group if name != "params"})
            for part, state in zip(objects, states, strict=True):
                part.load_state_dict(state)

        return load

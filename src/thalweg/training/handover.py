"""A run's state from one rank to another: for one that was too far behind, or comes back.

As in a checkpoint, but whole and in memory: JSON, and the tensors as safetensors has them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import nn

from thalweg.training.course import Position
from thalweg.training.packing import pack, unpack
from thalweg.transports import Array

if TYPE_CHECKING:
    from thalweg.training.run import Stateful

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a rank holds before `step`."""

    step: int
    position: Position
    meetings: int  # at the store, so far
    shared: int  # rounds between steps, so far
    agreed: int  # changes of plan and the like, up to there
    ended: bool  # its training is over
    model: dict[str, Any]
    optimizer: dict[str, Any]
    objects: list[Any]

    def in_bytes(self) -> Array:
        parts = {"model": self.model, "optimizer": self.optimizer, "objects": self.objects}
        tree, tensors = pack(parts, "state")
        head = {
            "step": self.step,
            "position": [self.position.epoch, self.position.batch],
            "meetings": self.meetings,
            "shared": self.shared,
            "agreed": self.agreed,
            "ended": self.ended,
            "tree": tree,
        }
        text = json.dumps(head).encode()
        return np.frombuffer(LENGTH.pack(len(text)) + text + save(tensors), np.uint8)

    @classmethod
    def of_bytes(cls, array: Array) -> State:
        data = array.tobytes()
        (length,) = LENGTH.unpack_from(data)
        head = json.loads(data[LENGTH.size : LENGTH.size + length])
        parts = unpack(head["tree"], load(data[LENGTH.size + length :]))
        epoch, batch = head["position"]
        return cls(
            step=head["step"],
            position=Position(epoch=epoch, batch=batch),
            meetings=head["meetings"],
            shared=head["shared"],
            agreed=head["agreed"],
            ended=head["ended"],
            **parts,
        )

    def load_into(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, objects: Sequence[Stateful]
    ) -> None:
        model.load_state_dict(self.model)
        optimizer.load_state_dict(self.optimizer)
        vars(optimizer)["_opt_called"] = True  # or torch's schedulers warn: it steps after them
        for held, state in zip(objects, self.objects, strict=True):
            held.load_state_dict(state)

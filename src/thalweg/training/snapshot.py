"""The state of a run: model, optimizer, objects, position in the data, plan, step, and the state
that the plan keeps from step to step.

It is carried in three ways: by a checkpoint folder (`checkpoint.py`), by a broadcast among ranks,
and by a message in a coded tree. A script carries it as a state dict. All but the folder pack it
alike: JSON, and tensors (`state_encoding.py`).

A snapshot that goes from rank to rank travels with a digest (`engine.digest`), and nothing is
loaded that differs from it: a broadcast is repeated, and a message is requested from another rank.
The digest takes one pass over the bytes on the donor and on each recipient, at about the speed of
memory, and the broadcast ends with an exchange of one number.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load, save
from torch import nn

from thalweg.engine.collectives import BROADCAST_CHUNK_BYTES, Collectives
from thalweg.engine.digest import digest
from thalweg.errors import RunError, ranks_text
from thalweg.training.data.position import BatchIndex
from thalweg.training.plan_state import ARRAYS_FIELD, COMBINE_FIELD, PlanState, packed, unpacked
from thalweg.training.state_encoding import (
    MISREAD_ERRORS,
    Tensors,
    kinds_of,
    pack,
    places_for,
    unpack,
)
from thalweg.transports import Array

SNAPSHOT_FORMAT = 1
FORMAT_FIELD = "thalweg snapshot"  # of a packed snapshot, with its format
MAX_TRANSFER_COUNT = 3  # of one snapshot, until it arrives as it was sent
MESSAGE_PREFIX_STRUCT = struct.Struct("<qqq")  # the sender, the digest of the rest, the head's size
log = logging.getLogger("thalweg")


class Stateful(Protocol):
    """A scheduler, a scaler, or another object whose state belongs to the training."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankState:
    """The state that one rank has of its own: random generators, and its part of what the plan
    keeps."""

    random: Mapping[str, Any] = field(default_factory=dict)
    kept: PlanState = field(default_factory=dict)

    def packed(self) -> dict[str, Any]:
        return {**self.random, **packed(self.kept)}

    @classmethod
    def of(cls, state: Mapping[str, Any] | None) -> RankState | None:
        """The state that `packed` made, or None."""
        if state is None:
            return None
        of_plan = (ARRAYS_FIELD, COMBINE_FIELD)
        random = {name: value for name, value in state.items() if name not in of_plan}
        return cls(random=random, kept=unpacked(state))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The state of a run before `step`, as one rank has it."""

    step: int
    position: BatchIndex
    sampling: Mapping[str, int] = field(default_factory=dict)  # the position depends on these
    plan: str
    model: dict[str, Any]
    optimizer: Any
    objects: list[Any]
    kept: PlanState = field(default_factory=dict)  # what recipients get of the plan's state
    # The members' own states in their order, those of ranks 0, 1, ... for a run of as many; None
    # where it isn't known.
    ranks: Sequence[RankState | None] = ()
    collectives: int = 0  # between the last step and this one, so far
    changes: int = 0  # agreed changes, such as plans, up to this step
    ended: bool = False  # the training of this rank is over

    def packed(self) -> dict[str, Any]:
        """The snapshot as plain containers, numbers and tensors, which share its memory."""
        return {
            FORMAT_FIELD: SNAPSHOT_FORMAT,
            **{own.name: getattr(self, own.name) for own in fields(self)},
            "position": [self.position.epoch, self.position.batch],
            "sampling": dict(self.sampling),
            "kept": packed(self.kept),
            "ranks": [rank and rank.packed() for rank in self.ranks],
        }

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> Snapshot:
        """The snapshot that `packed` made; ValueError if it didn't."""
        try:
            values = dict(state)
            if (found := values.pop(FORMAT_FIELD, None)) != SNAPSHOT_FORMAT:
                raise ValueError(f"its format is {found}, not {SNAPSHOT_FORMAT}")
            epoch, batch = values["position"]
            counts = (epoch, batch, *(values[n] for n in ("step", "collectives", "changes")))
            if not all(type(count) is int and count >= 0 for count in counts):
                raise ValueError("a count is missing")
            if type(values["ended"]) is not bool or type(values["plan"]) is not str:
                raise TypeError("the plan or the end is missing")
            values["position"] = BatchIndex(epoch=epoch, batch=batch)
            values["kept"] = unpacked(values["kept"])
            values["ranks"] = [RankState.of(rank) for rank in values["ranks"]]
            return cls(**values)
        except MISREAD_ERRORS as error:
            raise ValueError(f"{type(error).__name__}: {error}".partition("\n")[0]) from None

    def in_parts(self) -> tuple[bytes, Tensors]:
        """A JSON header, and the tensors themselves, none of them copied."""
        tree, tensors = pack(self.packed(), "state")
        return json.dumps({"tree": tree, "tensors": kinds_of(tensors)}).encode(), tensors

    @classmethod
    def of_parts(cls, head: bytes, tensors: Tensors) -> Snapshot:
        return cls.unpacked(unpack(json.loads(head)["tree"], tensors))

    def broadcast(self, collectives: Collectives, donor: int, *, overwrites: bool) -> Snapshot:
        """The snapshot of `donor`, which all ranks of `collectives` get; if `overwrites`, in the
        tensors of this one. RunError if it doesn't arrive as it was sent."""
        head, tensors = self.in_parts()
        is_donor = collectives.rank == donor
        length = torch.tensor([len(head)])
        collectives.broadcast(donor, [length])
        text = torch.frombuffer(bytearray(head if is_donor else int(length)), dtype=torch.uint8)
        _broadcast_checked(collectives, donor, [text])
        if is_donor:
            _broadcast_checked(collectives, donor, tensors.values())
            return self
        head = text.numpy().tobytes()
        tensors = places_for(json.loads(head)["tensors"], tensors if overwrites else {})
        _broadcast_checked(collectives, donor, tensors.values())
        return Snapshot.of_parts(head, tensors)

    def in_bytes(self, sender: int) -> Array:
        head, tensors = self.in_parts()
        rest = head + save(tensors)
        prefix = MESSAGE_PREFIX_STRUCT.pack(sender, _digest_of_bytes(rest), len(head))
        return np.frombuffer(prefix + rest, np.uint8)

    @classmethod
    def of_bytes(cls, array: Array) -> Snapshot:
        """The snapshot that `in_bytes` encoded; RunError if the bytes are something else."""
        sender, data = "another rank", array.tobytes()
        try:
            number, expected, length = MESSAGE_PREFIX_STRUCT.unpack_from(data)
            sender, rest = f"rank {number}", data[MESSAGE_PREFIX_STRUCT.size :]
            if _digest_of_bytes(rest) != expected:
                raise ValueError("its digest isn't that of what was sent")
            return cls.of_parts(rest[:length], load(rest[length:]))
        except MISREAD_ERRORS as error:
            raise RunError(
                f"the snapshot of the run that {sender} sent can't be read "
                f"({str(error).partition(chr(10))[0]})",
                "start all workers with the same version of Thalweg, from the last checkpoint",
            ) from None

    def without_ranks(self, kept: PlanState) -> Snapshot:
        """The snapshot with `kept`, and nothing of what the ranks keep of their own but their
        random generators."""
        ranks = [rank and replace(rank, kept={}) for rank in self.ranks]
        return replace(self, kept=kept, ranks=ranks)

    def load_into(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objects: Sequence[Stateful],
        loading: Callable[[object], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Load the snapshot, once: an optimizer keeps the tensors that it loads. Each part is
        loaded inside the context that `loading` gives for it."""
        with loading(model):
            model.load_state_dict(self.model)
        with loading(optimizer):
            optimizer.load_state_dict(self.optimizer)
            # Torch loads the state of another kind of optimizer, too, and fails at the next step.
            for group in optimizer.param_groups:
                for name in optimizer.defaults.keys() - group.keys():
                    raise ValueError(f"it has no {name}")
        if self.step:
            vars(optimizer)["_opt_called"] = True  # otherwise torch's schedulers warn
        for part, state in zip(objects, self.objects, strict=True):
            with loading(part):
                part.load_state_dict(state)


def load_settings(
    optimizer: torch.optim.Optimizer,
    objects: Sequence[Stateful],
    groups: Sequence[Mapping[str, Any]],
    states: Sequence[Any],
) -> None:
    """Load the settings of an optimizer's parameter groups, and the states of `state=` objects."""
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        own.update({name: group[name] for name in group if name != "params"})
    for part, state in zip(objects, states, strict=True):
        part.load_state_dict(state)


def _broadcast_checked(
    collectives: Collectives, donor: int, tensors: Iterable[torch.Tensor]
) -> None:
    """Overwrite these tensors with those of `donor`, and repeat that until all ranks have the
    donor's digest."""
    raw = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    for _ in range(MAX_TRANSFER_COUNT):
        expected = torch.tensor([digest(raw)])
        collectives.broadcast(donor, [expected])
        chunks = (chunk for one in raw for chunk in torch.split(one, BROADCAST_CHUNK_BYTES.nbytes))
        collectives.broadcast(donor, chunks)
        is_wrong = digest(raw) != int(expected)
        answers = collectives.all_gather([collectives.rank if is_wrong else -1])
        wrong = [int(rank) for rank in answers[:, 0] if rank >= 0]
        if not wrong:
            return
        log.warning("the snapshot that rank %d sent changed on %s", donor, ranks_text(wrong))
    raise RunError(
        f"the snapshot that rank {donor} sent changed on its way to {ranks_text(wrong)}, "
        f"{MAX_TRANSFER_COUNT} times in a row",
        "check the memory and network of these hosts, and resume from a checkpoint",
    )


def _digest_of_bytes(data: bytes) -> int:
    return digest([torch.frombuffer(bytearray(data), dtype=torch.uint8)] if data else [])

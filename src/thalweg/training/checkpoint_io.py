"""Saving a run and loading it, in a checkpoint folder or as a state dict: one rank writes and reads
for all.

No shared folder is needed. Under exact plans one rank's model is that of all. Each rank's own state
goes to the writer: random generators through the store, what the plan keeps by a gather. Under a
code the root writes and reads without waiting for the others, whose own states aren't kept.

The reader broadcasts the snapshot, and each rank gets its own part of what the plan keeps. For
another plan or number of ranks that is redistributed, so that nothing is lost which counts.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thalweg
from thalweg.errors import CheckpointError, RunError
from thalweg.redundancy import waits_for_nobody
from thalweg.training import checkpoint
from thalweg.training.lifecycle import RankSession, inner
from thalweg.training.plan_state import (
    PlanState,
    redistributed,
    summands,
    tensors_in,
    with_tensors,
)
from thalweg.training.snapshot import RankState, Snapshot

MODEL_FILE_SUFFIXES = {".bin", ".ckpt", ".pt", ".pth", ".safetensors"}
SAVE_REMEDY = "call run.save on every rank, and allow more time with timeout= for slow disks"
LOAD_REMEDY = "look at the output of rank {}, or allow more time with timeout= for slow disks"
SAME_STATE_REMEDY = "give all ranks what run.state_dict() returned on one, rank 0 if possible"
log = logging.getLogger("thalweg")
OWN_FIELDS = ("optimizer", "objects")  # of a snapshot: the run keeps what it loads
Found = tuple[str, Snapshot]
"""A snapshot with its name for messages."""


def save(session: RankSession, directory: Path, keep: int) -> None:
    """Write a checkpoint of the run; CheckpointError on all ranks if it fails. Under a plan that
    waits for no rank, only the writer takes part, and the other ranks' own states aren't kept."""
    with _equal_replicas(session) as (number, ranks):
        write = partial(_write, session, directory, keep, ranks)
        if number:
            _outcome(session, session.world.members[0], f"save/{number}", SAVE_REMEDY, write)
        elif session.is_checkpoint_writer:
            write()


def state_of(session: RankSession) -> dict[str, Any]:
    """The run as a state dict with tensors of its own. The first member gets the own states of all
    ranks, other ranks theirs alone, and so does every rank under a plan that waits for none."""
    with _equal_replicas(session) as (_, ranks):
        return deepcopy(_snapshot(session, ranks).packed())


def own_state_of(session: RankSession) -> dict[str, Any]:
    """The state dict of this rank alone, in a loop iteration whose step was interrupted."""
    return deepcopy(_snapshot(session, _own_state(session)).packed())


@contextmanager
def _equal_replicas(session: RankSession) -> Iterator[tuple[int, list[RankState | None]]]:
    """Inside, replicas are equal. Gives the own states of the ranks, as far as this one gets them,
    and the number of this exchange at the store; 0 if no rank waits for another."""
    number = 0 if waits_for_nobody(session.plan) else session.next_store_exchange()
    with session.averaged_replicas(), session.averaged_optimizer_state():
        yield number, _gather(session, number) if number else _own_state(session)


def _own_state(session: RankSession) -> list[RankState | None]:
    own = RankState(random=_random_states(), kept=session.attached.kept)
    return [own if rank == session.rank else None for rank in session.world.members]


def _gather(session: RankSession, number: int) -> list[RankState | None]:
    """Gather each rank's own state on the first member; elsewhere only this rank's is known.
    `number` tells this use of the store from others."""
    world, kept = session.world, session.attached.kept
    key = f"save/{number}"
    world.put(f"{key}/{world.rank}", json.dumps(_random_states()))
    writer = world.members[0]
    gathered = session.collectives.gather(writer, tensors_in(kept))
    if world.rank != writer:
        return _own_state(session)
    random_states = world.read_all(
        key, session.abort_flag, lambda rank: _late(session, f"{key}/{rank}", SAVE_REMEDY)
    )
    for rank in world.members:
        world.remove(f"{key}/{rank}")
    return [
        RankState(random=json.loads(random_states[rank]), kept=with_tensors(kept, tensors))
        for rank, tensors in zip(world.members, gathered, strict=True)
    ]


def _outcome(
    session: RankSession, rank: int, key: str, remedy: str, work: Callable[[], str | None]
) -> str | None:
    """The result of `work` on one rank, which all ranks get through the store by `key`. If it
    raises a CheckpointError, all ranks do."""
    if session.rank == rank:
        try:
            outcome = {"result": work()}
        except CheckpointError as error:
            outcome = {"problem": error.problem, "remedy": error.remedy}
        session.world.put(key, json.dumps(outcome))
    late = _late(session, key, remedy)
    outcome = json.loads(session.world.read(key, session.abort_flag, late))
    if "problem" in outcome:
        raise CheckpointError(outcome["problem"], outcome["remedy"])
    result: str | None = outcome["result"]
    return result


def _snapshot(session: RankSession, ranks: list[RankState | None]) -> Snapshot:
    return replace(session.snapshot(), position=session.data_position.resume_at, ranks=ranks)


def _write(session: RankSession, directory: Path, keep: int, ranks: list[RankState | None]) -> None:
    membership = session.world.membership
    checkpoint.write(
        directory,
        _snapshot(session, ranks),
        version=thalweg.__version__,
        keep=keep,
        fence=(lambda: None) if membership is None else membership.raise_if_outdated,
    )


def load(session: RankSession, directory: Path) -> PlanState | None:
    """Load the newest checkpoint that the checkpoint writer finds, at the start of a run. Returns
    this rank's part of what the plan keeps; None if there is no checkpoint."""

    def find() -> Found | None:
        found = newest(directory)
        return None if found is None else (f"checkpoint {found[0]}", found[1])

    return _load(session, find, "resume")


def load_state(session: RankSession, state: Mapping[str, Any]) -> PlanState:
    """Load a state dict of `state_of`, before the first step of a run: the one that the checkpoint
    writer was given. Returns this rank's part of what the plan keeps."""
    rank, reader = session.rank, session.checkpoint_writer()
    step, why = -1, ""
    try:
        snapshot = Snapshot.unpacked(state)
        step = snapshot.step
    except (TypeError, ValueError) as error:
        why = f" ({error})"
    steps = [int(row[0]) for row in session.collectives.all_gather([step])]
    given = dict(zip(session.world.members, steps, strict=True))
    for other, its_step in given.items():
        if its_step < 0:
            raise CheckpointError(
                f"rank {other} was given no state of a run{why if other == rank else ''}",
                SAME_STATE_REMEDY,
            )
        if its_step != given[reader]:
            raise CheckpointError(
                f"rank {other} was given the state of step {its_step}, and rank {reader} that of "
                f"step {given[reader]}",
                SAME_STATE_REMEDY,
            )
    if session.plan.cadence.staleness is not None and step == session.step:
        raise CheckpointError(
            f"rank {reader} was given a state of step {step}, at which {session.plan} runs already",
            "load it under another plan, or start without it",
        )
    # An optimizer keeps the tensors that it loads, and these are the script's.
    snapshot = replace(snapshot, **deepcopy({n: getattr(snapshot, n) for n in OWN_FIELDS}))

    def find() -> Found:
        snapshot.in_parts()  # raises if it can't be sent
        return f"the state given to rank {reader}", snapshot

    kept = _load(session, find, f"load/{session.next_store_exchange()}")
    assert kept is not None
    return kept


def _load(session: RankSession, find: Callable[[], Found | None], key: str) -> PlanState | None:
    """Load the snapshot that the checkpoint writer finds; its outcome is in the store by `key`."""
    world, reader, members = session.world, session.checkpoint_writer(), session.world.members
    parts: list[PlanState] = []
    # The other ranks' tensors are overwritten.
    snapshot = replace(session.snapshot(), optimizer={}, objects=[])

    def read() -> str | None:
        nonlocal snapshot, parts
        found = find()
        if found is None:
            return None
        name, snapshot = found
        _raise_if_it_differs(session, name, snapshot)
        parts = _kept_parts(name, snapshot, str(session.plan), len(members))
        snapshot = snapshot.without_ranks(parts[members.index(reader)])
        return name

    name = _outcome(session, reader, key, LOAD_REMEDY.format(reader), read)
    if name is None:
        return None
    snapshot = snapshot.broadcast(session.collectives, reader, overwrites=True)
    own = tensors_in(snapshot.kept)
    session.collectives.scatter(reader, [tensors_in(p) for p in parts] or [own] * len(members))
    model = inner(session.model)
    saved = model.state_dict().keys()
    buffers = [tensor for name, tensor in model.named_buffers() if name not in saved]
    session.collectives.broadcast(reader, buffers)
    loading = partial(_explaining_misfit, name)
    snapshot.load_into(model, session.optimizer, session.state, loading)
    if len(snapshot.ranks) == len(members):
        own_state = snapshot.ranks[members.index(world.rank)]
        if own_state is not None and own_state.random:
            _set_random_states(own_state.random)
    session.clock.step = snapshot.step
    session.data_position.jump(snapshot.position)
    return snapshot.kept


def _kept_parts(name: str, snapshot: Snapshot, plan: str, ranks: int) -> list[PlanState]:
    """The part of each of `ranks` ranks of the state that the snapshot's plan has kept."""
    kept = [rank.kept for rank in snapshot.ranks if rank is not None]
    if not any(kept):
        return [{}] * ranks
    if len(kept) < len(snapshot.ranks):
        raise CheckpointError(
            f"{name} has what {snapshot.plan} keeps on {len(kept)} of {len(snapshot.ranks)} ranks",
            "load the state dict of the first member, which has that of all ranks",
        )
    if len(kept) != ranks:
        return [redistributed(kept, ranks)] * ranks
    return kept if snapshot.plan == plan else [summands(state) for state in kept]


def _raise_if_it_differs(session: RankSession, name: str, saved: Snapshot) -> None:
    """Raise CheckpointError if this run has other `state=` objects or draws other samples."""
    objects = len(session.state)
    if len(saved.objects) != objects:
        raise CheckpointError(
            f"{name} holds {len(saved.objects)} state= objects, and {objects} are given",
            "give attach() the same objects",
        )
    for setting, value in session.data_position.sampling.items():
        if saved.sampling.get(setting, value) != value:
            raise CheckpointError(
                f"{name} was written with {setting} {saved.sampling[setting]}, now it is {value}",
                "resume with the same value: the position in the data depends on it",
            )


@contextmanager
def _explaining_misfit(name: str, target: object) -> Iterator[None]:
    """Convert the errors of loading a state into an object that it doesn't fit to a
    CheckpointError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"{name} doesn't fit this {type(target).__name__} ({reason})",
            "resume with the script that wrote it, or name another",
        ) from None


def _late(session: RankSession, key: str, remedy: str) -> RunError:
    waited = f"rank {session.rank} waited {session.world.timeout:g} s for {key!r} in the store"
    return RunError(waited, remedy)


def _random_states() -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(state) for state in gpus],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }


def _set_random_states(saved: Mapping[str, Any]) -> None:
    torch.set_rng_state(_unhex(saved["torch"]))
    if saved["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_unhex(text) for text in saved["cuda"]])
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _unhex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def newest(directory: Path) -> tuple[Path, Snapshot] | None:
    """The newest checkpoint that is sound in every byte; None if there is none yet. Damaged ones
    are skipped, each with a warning. CheckpointError if all are damaged, if the newest needs a
    newer Thalweg, or if the folder holds other models."""
    damages: list[CheckpointError] = []
    for path in checkpoint.checkpoints_in(directory):
        try:
            saved = checkpoint.read(path)
        except checkpoint.NewerFormat:
            raise
        except CheckpointError as error:
            damages.append(error)
        else:
            for damage in damages:
                log.warning("%s; the run resumes from %s", damage.problem, path)
            return path, saved
    if damages:
        raise damages[0]
    # Trainers put models into the folder or one level below; killed writers leave hidden folders.
    for file in (*sorted(directory.glob("*")), *sorted(directory.glob("*/*"))):
        name = file.relative_to(directory)
        hidden = any(part.startswith(".") for part in name.parts)
        if file.suffix in MODEL_FILE_SUFFIXES and not hidden:
            raise CheckpointError(
                f"{directory} holds {name}, and no checkpoint of a run",
                "name the folder that was given to run.save, or a new one to start from the "
                "beginning",
            )
    return None

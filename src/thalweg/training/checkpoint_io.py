"""Saving a run to a checkpoint and loading it: one rank writes and reads for all.

No shared folder is needed. Under exact plans one rank's model is that of all. Each rank's own state
goes to the writer: random generators through the store, compressor state by a gather. Under a code
the root writes and reads without waiting for the others, whose own states aren't kept.

On another number of ranks the compressor state is redistributed, so that nothing is lost.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thalweg
from thalweg.errors import CheckpointError, RunError
from thalweg.redundancy import waits_for_nobody
from thalweg.training import checkpoint
from thalweg.training.compressor_state import (
    CompressorState,
    redistribute,
    summable_state,
)
from thalweg.training.data.position import BatchIndex
from thalweg.training.lifecycle import RankSession, inner
from thalweg.training.state_encoding import kinds_of, map_state, pack, places_for, unpack

SAVED = "fine"  # the value in the store that says so
MODEL_FILE_SUFFIXES = {".bin", ".ckpt", ".pt", ".pth", ".safetensors"}
SAVE_REMEDY = "call run.save on every rank, and allow more time with timeout= for slow disks"
LOAD_REMEDY = "look at the output of rank {}, or allow more time with timeout= for slow disks"
log = logging.getLogger("thalweg")
CompressorTensors = dict[str, dict[str, torch.Tensor]]
"""The compressor state of a rank: by kind, then by parameter."""
COMPRESSOR_STATE_FIELD = "compression"  # of a rank's own state, beside its random states


def save(session: RankSession, directory: Path, keep: int) -> None:
    """Write a checkpoint of the run; CheckpointError on all ranks if it fails. Under a plan that
    waits for no rank, only the writer takes part, and the other ranks' own states aren't kept."""
    gathers = not waits_for_nobody(session.plan)
    number = session.next_store_exchange() if gathers else 0
    with session.averaged_replicas(), session.averaged_optimizer_state():
        if gathers:
            _gather_and_write(session, directory, keep, number)
        elif session.is_checkpoint_writer:
            ranks = session.world.members
            states = [_random_states() if rank == session.rank else None for rank in ranks]
            _write(session, directory, keep, states)


def _gather_and_write(session: RankSession, directory: Path, keep: int, number: int) -> None:
    """Gather each rank's own state on the first rank, which writes the checkpoint, and wait for its
    result. `number` tells this use of the store from others."""
    world, state = session.world, session.attached.compressor_state
    own, result = f"save/{number}/{world.rank}", f"save/{number}"
    world.put(own, json.dumps(_random_states()))
    places = _places(state)
    writer = world.members[0]
    gathered = session.collectives.gather(
        writer, [torch.from_numpy(state[kind][name]) for kind, name in places]
    )
    problem = SAVED
    if world.rank == writer:
        try:
            keys = [f"{result}/{rank}" for rank in world.members]
            states = [json.loads(_wait(session, key, SAVE_REMEDY)) for key in keys]
            for random_states, tensors in zip(states, gathered, strict=True):
                random_states[COMPRESSOR_STATE_FIELD] = _by_kind(places, tensors)
            _write(session, directory, keep, states)
        except CheckpointError as error:
            problem = json.dumps([error.problem, error.remedy])
        world.put(result, problem)
    else:
        problem = _wait(session, result, SAVE_REMEDY).decode()
    world.remove(own)
    if problem != SAVED:
        raise CheckpointError(*json.loads(problem))


def _write(session: RankSession, directory: Path, keep: int, ranks: list[Any]) -> None:
    """Write a checkpoint; `ranks` are the own states of the members in their order, which are those
    of ranks 0, 1, ... when a run of as many ranks loads it."""
    membership = session.world.membership
    position = asdict(session.data_position.resume_at)
    checkpoint.write(
        directory,
        checkpoint.Checkpoint(
            step=session.step,
            plan=str(session.plan),
            size=len(session.world.members),
            position=position | session.data_position.sampling,
            model=inner(session.model).state_dict(),
            optimizer=session.optimizer.state_dict(),
            state=[part.state_dict() for part in session.state],
            ranks=ranks,
        ),
        version=thalweg.__version__,
        keep=keep,
        fence=(lambda: None) if membership is None else membership.raise_if_outdated,
    )


def load(session: RankSession, directory: Path) -> CompressorState | None:
    """Load the newest checkpoint that the checkpoint writer finds, at the start of a run, where the
    members are all ranks from 0 on. Returns this rank's part of the compressor state; None if there
    is no checkpoint."""
    world, reader, optimizer = session.world, session.checkpoint_writer(), session.optimizer
    model, plan = inner(session.model), str(session.plan)
    tensors: dict[str, torch.Tensor] = {}
    kept: list[CompressorTensors] = []
    if world.rank == reader:
        header, tensors, kept = _read(session, directory)
        if kept and (header["plan"] != plan or len(kept) != world.size):
            kept = _redistributed(kept, world.size)
            header["held"] = map_state(kept[0], lambda tensor: list(tensor.shape))
        world.put("resume", json.dumps(header))
    header = json.loads(_wait(session, "resume", LOAD_REMEDY.format(reader)))
    if "problem" in header:
        raise CheckpointError(header["problem"], header["remedy"])
    if "step" not in header:
        return None
    session.broadcast_model(reader)
    if world.rank != reader:
        tensors = places_for(header["tensors"], {})
    session.collectives.broadcast(reader, (tensors[name] for name in header["tensors"]))
    states = unpack(header["tree"], tensors)
    with _explaining_misfit(header["path"], model):
        model.load_state_dict(states["model"], strict=False)
    with _explaining_misfit(header["path"], optimizer):
        optimizer.load_state_dict(states["optimizer"])
        _raise_if_incomplete(optimizer)
    if header["step"]:
        vars(optimizer)["_opt_called"] = True  # otherwise torch's schedulers warn
    for part, saved in zip(session.state, states["state"], strict=True):
        with _explaining_misfit(header["path"], part):
            part.load_state_dict(saved)
    random_states = header["ranks"][world.rank] if world.size == header["size"] else None
    if random_states is not None:
        _set_random_states(random_states)
    session.clock.step = header["step"]
    position = header["position"]
    session.data_position.jump(BatchIndex(epoch=position["epoch"], batch=position["batch"]))
    return _scatter_compressor_state(session, reader, header["held"], kept)


def _read(
    session: RankSession, directory: Path
) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[CompressorTensors]]:
    """Read the newest checkpoint and load its model on the reader. Returns the header for the other
    ranks, the tensors that they need, and each rank's compressor state. The header has a problem
    instead if the checkpoint doesn't fit this run, and is empty if there is none."""
    try:
        path_and_checkpoint = newest(directory)
        if path_and_checkpoint is None:
            return {}, {}, []
        path, saved = path_and_checkpoint
        _raise_if_it_differs(session, path, saved)
        with _explaining_misfit(str(path), inner(session.model)):
            inner(session.model).load_state_dict(saved.model)
    except CheckpointError as error:
        return {"problem": error.problem, "remedy": error.remedy}, {}, []
    extra = {k: v for k, v in saved.model.items() if not isinstance(v, torch.Tensor)}
    tree, tensors = pack(
        {"model": extra, "optimizer": saved.optimizer, "state": saved.state}, "checkpoint"
    )
    kept = [rank.pop(COMPRESSOR_STATE_FIELD, {}) for rank in saved.ranks if rank is not None]
    header = {
        "held": map_state(kept[0], lambda tensor: list(tensor.shape)) if kept else {},
        "plan": saved.plan,
        "path": str(path),
        "step": saved.step,
        "size": saved.size,
        "position": saved.position,
        "ranks": saved.ranks,
        "tree": tree,
        "tensors": kinds_of(tensors),
    }
    return header, tensors, kept


def _raise_if_it_differs(session: RankSession, path: Path, saved: checkpoint.Checkpoint) -> None:
    """Raise CheckpointError if this run has other `state=` objects or draws other samples."""
    objects = len(session.state)
    if len(saved.state) != objects:
        raise CheckpointError(
            f"{path} holds {len(saved.state)} state= objects, and {objects} are given",
            "give attach() the same objects",
        )
    for name, value in session.data_position.sampling.items():
        if saved.position.get(name, value) != value:
            raise CheckpointError(
                f"{path} was written with {name} {saved.position[name]}, now it is {value}",
                "resume with the same value: the position in the data depends on it",
            )


def _redistributed(kept: list[CompressorTensors], ranks: int) -> list[CompressorTensors]:
    """The compressor state of each of `ranks` ranks, if their plan or their number is another than
    that of the `kept` states."""
    arrays = [map_state(state, torch.Tensor.numpy) for state in kept]
    if len(kept) == ranks:
        new: list[CompressorState] = [summable_state(state) for state in arrays]
    else:
        new = [redistribute(arrays, ranks)] * ranks
    return [map_state(state, torch.from_numpy) for state in new]


def _scatter_compressor_state(
    session: RankSession,
    reader: int,
    shapes: dict[str, dict[str, list[int]]],
    kept: list[CompressorTensors],
) -> CompressorState:
    """Scatter the compressor states that the reader has; returns that of this rank."""
    places = _places(shapes)
    empty = [torch.empty(shapes[kind][name], dtype=torch.float32) for kind, name in places]
    all_states = [empty] * session.world.size
    if session.rank == reader and kept:
        all_states = [[state[kind][name] for kind, name in places] for state in kept]
    session.collectives.scatter(reader, all_states)
    return map_state(_by_kind(places, all_states[session.rank]), torch.Tensor.numpy)


def _places(state: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """The kinds and parameters of a compressor state, in an order that all ranks share."""
    return [(kind, name) for kind, names in state.items() for name in names]


def _by_kind(
    places: Sequence[tuple[str, str]], tensors: Sequence[torch.Tensor]
) -> CompressorTensors:
    state: CompressorTensors = {}
    for (kind, name), tensor in zip(places, tensors, strict=True):
        state.setdefault(kind, {})[name] = tensor
    return state


@contextmanager
def _explaining_misfit(path: str, target: object) -> Iterator[None]:
    """Convert the errors of loading a state into an object that it doesn't fit to a
    CheckpointError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"checkpoint {path} doesn't fit this {type(target).__name__} ({reason})",
            "resume with the script that wrote it, or name another",
        ) from None


def _raise_if_incomplete(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the loaded state lacks a setting of this optimizer, as that of another kind does:
    torch loads it nevertheless, and fails at the next step."""
    for group in optimizer.param_groups:
        for name in optimizer.defaults.keys() - group.keys():
            raise ValueError(f"it has no {name}")


def _wait(session: RankSession, key: str, remedy: str) -> bytes:
    timeout = session.engine.timeout
    value = session.world.wait_for(key, timeout, session.abort_flag)
    if value is None:
        raise RunError(f"rank {session.rank} waited {timeout:g} s for {key!r} in the store", remedy)
    return value


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


def _set_random_states(saved: dict[str, Any]) -> None:
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


def newest(directory: Path) -> tuple[Path, checkpoint.Checkpoint] | None:
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
    for file in _models_in(directory):
        raise CheckpointError(
            f"{directory} holds {file.relative_to(directory)}, and no checkpoint of a run",
            "name the folder that was given to run.save, or a new one to start from the beginning",
        )
    return None


def _models_in(directory: Path) -> Iterator[Path]:
    """Model files in a folder and one level below, where trainers put them; hidden folders are
    leftovers of killed writers."""
    for pattern in ("*", "*/*"):
        for file in sorted(directory.glob(pattern)):
            hidden = any(part.startswith(".") for part in file.relative_to(directory).parts)
            if file.suffix in MODEL_FILE_SUFFIXES and not hidden:
                yield file

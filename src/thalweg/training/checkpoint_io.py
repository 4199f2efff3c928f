"""Saving a run to a checkpoint and loading it: one rank writes and reads for all.

No shared folder is needed. Under exact plans one rank's model is that of all. The state that each
rank has alone goes to the writer: random generators through the store, compressor state by a
gather. Under a code the root writes and reads without waiting for the others, whose random states
aren't kept.

On another number of ranks the compressor state is redistributed, so that nothing is lost.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import thalweg
from thalweg.engine.collectives import Collectives
from thalweg.errors import CheckpointError, RunError
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.training import checkpoint
from thalweg.training.compressor_state import CompressorState, redistribute, summable_state
from thalweg.training.data.position import BatchIndex
from thalweg.training.snapshot import Stateful
from thalweg.training.state_encoding import kinds_of, pack, places_for, unpack

NO_PROBLEM = "fine"
MODEL_FILE_SUFFIXES = {".bin", ".ckpt", ".pt", ".pth", ".safetensors"}
log = logging.getLogger("thalweg")
CompressorTensors = dict[str, dict[str, torch.Tensor]]
"""A rank's compressor state: by kind, then by parameter."""
COMPRESSOR_STATE_FIELD = "compression"  # beside a rank's random states


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """The parts of a checkpoint that the session loads itself."""

    step: int
    position: BatchIndex
    compressor_state: CompressorState  # of this rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumable:
    """The parts of a rank's session that checkpoints need."""

    world: World
    abort_flag: AbortFlag
    timeout: float
    collectives: Collectives
    plan: str
    sampling: dict[str, int]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: Sequence[Stateful]


def save(
    directory: Path,
    run: Resumable,
    *,
    number: int,
    step: int,
    position: BatchIndex,
    compressor_state: CompressorState,
    keep: int,
    alone: bool,
) -> None:
    """Write the `number`-th checkpoint of this run; CheckpointError on all ranks if it fails. With
    `alone`, a rank writes without the others, and without their own state."""
    world = run.world

    def write(ranks: list[Any]) -> None:
        checkpoint.write(
            directory,
            checkpoint.Checkpoint(
                step=step,
                plan=run.plan,
                size=len(world.members),
                position={**asdict(position), **run.sampling},
                model=run.model.state_dict(),
                optimizer=run.optimizer.state_dict(),
                state=[part.state_dict() for part in run.state],
                ranks=ranks,
            ),
            version=thalweg.__version__,
            keep=keep,
            **({} if world.membership is None else {"fence": world.membership.raise_if_outdated}),
        )

    if alone:
        write([_random_states() if rank == world.rank else None for rank in world.members])
        return
    own = f"save/{number}/{world.rank}"
    world.put(own, json.dumps(_random_states()))
    places = [(kind, name) for kind, arrays in compressor_state.items() for name in arrays]
    own_state = [torch.from_numpy(compressor_state[kind][name]) for kind, name in places]
    writer = world.members[0]
    gathered = run.collectives.gather(writer, own_state)
    problem = NO_PROBLEM
    if world.rank == writer:
        keys = [f"save/{number}/{rank}" for rank in world.members]
        try:
            states = [json.loads(_wait(run, key)) for key in keys]
            for state, tensors in zip(states, gathered, strict=True):
                state[COMPRESSOR_STATE_FIELD] = _by_kind(places, tensors)
            write(states)
        except CheckpointError as error:
            problem = json.dumps([error.problem, error.remedy])
        world.put(f"save/{number}", problem)
    else:
        problem = _wait(run, f"save/{number}").decode()
    world.remove(own)
    if problem != NO_PROBLEM:
        raise CheckpointError(*json.loads(problem))


def load(directory: Path, run: Resumable, reader: int) -> LoadedCheckpoint | None:
    """Load the newest checkpoint that the rank `reader` finds; None if there is none."""
    world, model, optimizer = run.world, run.model, run.optimizer
    tensors: dict[str, torch.Tensor] = {}
    kept: list[CompressorTensors] = []
    if world.rank == reader:
        header, tensors, kept = _read(directory, model, run.sampling, len(run.state))
        if kept and (header["plan"] != run.plan or len(kept) != world.size):
            kept = _redistributed(kept, world.size, alike=len(kept) == world.size)
            header["held"] = _shapes(kept[0])
        world.put("resume", json.dumps(header))
    header = json.loads(_wait(run, "resume"))
    if "problem" in header:
        raise CheckpointError(header["problem"], header["remedy"])
    if "step" not in header:
        return None
    run.collectives.broadcast(reader, [*(p.detach() for p in model.parameters()), *model.buffers()])
    if world.rank != reader:
        tensors = places_for(header["tensors"], {})
    run.collectives.broadcast(reader, (tensors[name] for name in header["tensors"]))
    states = unpack(header["tree"], tensors)
    with _same_kind(header["path"], type(model).__name__):
        model.load_state_dict(states["model"], strict=False)
    with _same_kind(header["path"], type(optimizer).__name__):
        optimizer.load_state_dict(states["optimizer"])
        _refuse_another(optimizer)
    if header["step"]:
        vars(optimizer)["_opt_called"] = True  # otherwise torch's schedulers warn
    for part, saved in zip(run.state, states["state"], strict=True):
        with _same_kind(header["path"], type(part).__name__):
            part.load_state_dict(saved)
    own = header["ranks"][world.rank] if world.size == header["size"] else None
    if own is not None:
        _set_random_states(own)
    return LoadedCheckpoint(
        step=header["step"],
        position=_position(header["position"]),
        compressor_state=_load_compressor_state(header["held"], kept, reader, run),
    )


def _position(saved: dict[str, int]) -> BatchIndex:
    return BatchIndex(epoch=saved["epoch"], batch=saved["batch"])


def _read(
    directory: Path, model: nn.Module, sampling: dict[str, int], objects: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[CompressorTensors]]:
    """Load the model on the reader. Returns the header for the other ranks, the tensors that they
    need, and each rank's compressor state."""
    try:
        there = newest(directory)
        if there is None:
            return {}, {}, []
        found, saved = there
        if len(saved.state) != objects:
            raise CheckpointError(
                f"{found} holds {len(saved.state)} state= objects, and {objects} are given",
                "give attach() the same objects",
            )
        for name, value in sampling.items():
            if saved.position.get(name, value) != value:
                raise CheckpointError(
                    f"{found} was written with {name} {saved.position[name]}, now it is {value}",
                    "resume with the same value: the position in the data depends on it",
                )
        with _same_kind(str(found), type(model).__name__):
            model.load_state_dict(saved.model)
    except CheckpointError as error:
        return {"problem": error.problem, "remedy": error.remedy}, {}, []
    extra = {k: v for k, v in saved.model.items() if not isinstance(v, torch.Tensor)}
    parts = {"model": extra, "optimizer": saved.optimizer, "state": saved.state}
    tree, tensors = pack(parts, "checkpoint")
    kept = [rank.pop(COMPRESSOR_STATE_FIELD, {}) for rank in saved.ranks if rank is not None]
    header = {
        "held": _shapes(kept[0] if kept else {}),
        "plan": saved.plan,
        "path": str(found),
        "step": saved.step,
        "size": saved.size,
        "position": saved.position,
        "ranks": saved.ranks,
        "tree": tree,
        "tensors": kinds_of(tensors),
    }
    return header, tensors, kept


def _shapes(held: CompressorTensors) -> dict[str, dict[str, list[int]]]:
    return {k: {name: list(t.shape) for name, t in arrays.items()} for k, arrays in held.items()}


def _redistributed(
    kept: list[CompressorTensors], ranks: int, *, alike: bool
) -> list[CompressorTensors]:
    """The compressor state of each of `ranks` ranks under another plan, or in another number."""
    arrays = [{k: {n: t.numpy() for n, t in v.items()} for k, v in one.items()} for one in kept]
    if alike:
        new: list[CompressorState] = [summable_state(one) for one in arrays]
    else:
        new = [redistribute(arrays, ranks)] * ranks
    return [{k: {n: torch.from_numpy(a) for n, a in v.items()} for k, v in x.items()} for x in new]


def _load_compressor_state(
    shapes: dict[str, dict[str, list[int]]],
    kept: list[CompressorTensors],
    reader: int,
    run: Resumable,
) -> CompressorState:
    """The part of this rank in the compressor states that the reader has."""
    places = [(kind, name) for kind in shapes for name in shapes[kind]]
    empty = [torch.empty(shapes[kind][name], dtype=torch.float32) for kind, name in places]
    all_states = [empty] * run.world.size
    if run.world.rank == reader and kept:
        all_states = [[one[kind][name] for kind, name in places] for one in kept]
    run.collectives.scatter(reader, all_states)
    own = _by_kind(places, all_states[run.world.rank])
    return {kind: {n: t.numpy() for n, t in arrays.items()} for kind, arrays in own.items()}


def _by_kind(
    places: Sequence[tuple[str, str]], tensors: Sequence[torch.Tensor]
) -> CompressorTensors:
    found: CompressorTensors = {}
    for (kind, name), tensor in zip(places, tensors, strict=True):
        found.setdefault(kind, {})[name] = tensor
    return found


@contextmanager
def _same_kind(found: str, kind: str) -> Iterator[None]:
    """Convert an object's errors for a state that isn't its own to a CheckpointError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"checkpoint {found} doesn't fit this {kind} ({reason})",
            "resume with the script that wrote it, or name another",
        ) from None


def _refuse_another(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the loaded settings lack one: optimizers load any, and fail at their next step."""
    for group in optimizer.param_groups:
        for name in optimizer.defaults.keys() - group.keys():
            raise ValueError(f"it has no {name}")


def _wait(run: Resumable, key: str) -> bytes:
    found = run.world.wait_for(key, run.timeout, run.abort_flag)
    if found is None:
        raise RunError(
            f"rank {run.world.rank} waited {run.timeout:g} s for {key!r} in the store",
            "call run.save on every rank, and allow more time with timeout= for slow disks",
        )
    return found


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
    passed_over: list[CheckpointError] = []
    for path in checkpoint.checkpoints_in(directory):
        try:
            found = checkpoint.read(path)
        except checkpoint.NewerFormat:
            raise
        except CheckpointError as error:
            passed_over.append(error)
        else:
            for damage in passed_over:
                log.warning("%s; the run resumes from %s", damage.problem, path)
            return path, found
    if passed_over:
        raise passed_over[0]
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

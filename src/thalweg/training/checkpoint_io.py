"""From a run to its checkpoint and back: one rank writes and reads, the others send and are told.

No shared folder is needed. What is one rank's in an exact plan is everybody's; what is each rank's
own goes to the first: the state of its random number generators through the store, what its
compressor keeps by a round of its own. Under a code the root writes and reads, and waits for
nobody: others' random states aren't kept.

On another number of ranks what compressors kept is shared out anew, so that nothing is lost.
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
"""What a rank's compressor keeps: by kind, then by parameter."""
COMPRESSOR_STATE_FIELD = "compression"  # what a rank's compressor keeps, beside its random states


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    step: int
    position: BatchIndex
    compressor_state: CompressorState  # by this rank's compressor


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumable:
    """What a rank trains, and its way to the others, as far as checkpoints need them."""

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
    held: CompressorState,
    keep: int,
    alone: bool,
) -> None:
    """Write the `number`-th checkpoint of this run; CheckpointError on all ranks if it fails.
    `alone`, a rank writes without the others, and without what only they know."""
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
    places = [(kind, name) for kind in held for name in held[kind]]
    arrays = [torch.from_numpy(held[kind][name]) for kind, name in places]
    writer = world.members[0]
    everybodys = run.collectives.gather(writer, arrays)
    problem = NO_PROBLEM
    if world.rank == writer:
        keys = [f"save/{number}/{rank}" for rank in world.members]
        try:
            states = [json.loads(_wait(run, key)) for key in keys]
            for state_of_one, tensors in zip(states, everybodys, strict=True):
                state_of_one[COMPRESSOR_STATE_FIELD] = _by_kind(places, tensors)
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
    """Go back to the newest checkpoint that the rank `reader` finds; None if there is none."""
    world, model, optimizer = run.world, run.model, run.optimizer
    tensors: dict[str, torch.Tensor] = {}
    kept: list[CompressorTensors] = []
    if world.rank == reader:
        saying, tensors, kept = _read(directory, model, run.sampling, len(run.state))
        if kept and (saying["plan"] != run.plan or len(kept) != world.size):
            kept = _anew(kept, world.size, alike=len(kept) == world.size)
            saying["held"] = _shapes(kept[0])
        world.put("resume", json.dumps(saying))
    saying = json.loads(_wait(run, "resume"))
    if "problem" in saying:
        raise CheckpointError(saying["problem"], saying["remedy"])
    if "step" not in saying:
        return None
    run.collectives.broadcast(reader, [*(p.detach() for p in model.parameters()), *model.buffers()])
    if world.rank != reader:
        tensors = places_for(saying["tensors"], {})
    run.collectives.broadcast(reader, (tensors[name] for name in saying["tensors"]))
    states = unpack(saying["tree"], tensors)
    with _same_kind(saying["path"], type(model).__name__):
        model.load_state_dict(states["model"], strict=False)
    with _same_kind(saying["path"], type(optimizer).__name__):
        optimizer.load_state_dict(states["optimizer"])
        _refuse_another(optimizer)
    if saying["step"]:
        vars(optimizer)["_opt_called"] = True  # or torch's schedulers warn: it steps after them
    for part, saved in zip(run.state, states["state"], strict=True):
        with _same_kind(saying["path"], type(part).__name__):
            part.load_state_dict(saved)
    own = saying["ranks"][world.rank] if world.size == saying["size"] else None
    if own is not None:
        _set_random_states(own)
    return LoadedCheckpoint(
        step=saying["step"],
        position=_position(saying["position"]),
        compressor_state=_load_compressor_state(saying["held"], kept, reader, run),
    )


def _position(saved: dict[str, int]) -> BatchIndex:
    return BatchIndex(epoch=saved["epoch"], batch=saved["batch"])


def _read(
    directory: Path, model: nn.Module, sampling: dict[str, int], objects: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[CompressorTensors]]:
    """On the reader: load the model; what to tell the others, the tensors that they will need, and
    what each rank's compressor kept."""
    try:
        there = newest(directory)
        if there is None:
            return {}, {}, []
        found, saved = there
        if len(saved.state) != objects:
            raise CheckpointError(
                f"{found} holds {len(saved.state)} state= objects, and {objects} are given",
                "give attach() the same ones",
            )
        for name, value in sampling.items():
            if saved.position.get(name, value) != value:
                raise CheckpointError(
                    f"{found} was written with {name} {saved.position[name]}, now it is {value}",
                    "resume with the same, or its place in the data is another",
                )
        with _same_kind(str(found), type(model).__name__):
            model.load_state_dict(saved.model)
    except CheckpointError as error:
        return {"problem": error.problem, "remedy": error.remedy}, {}, []
    extra = {k: v for k, v in saved.model.items() if not isinstance(v, torch.Tensor)}
    parts = {"model": extra, "optimizer": saved.optimizer, "state": saved.state}
    tree, tensors = pack(parts, "checkpoint")
    kept = [rank.pop(COMPRESSOR_STATE_FIELD, {}) for rank in saved.ranks if rank is not None]
    saying = {
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
    return saying, tensors, kept


def _shapes(held: CompressorTensors) -> dict[str, dict[str, list[int]]]:
    return {k: {name: list(t.shape) for name, t in arrays.items()} for k, arrays in held.items()}


def _anew(kept: list[CompressorTensors], ranks: int, *, alike: bool) -> list[CompressorTensors]:
    """What each of so many ranks is to go on with, under another plan or in another number."""
    slots = [{k: {n: t.numpy() for n, t in v.items()} for k, v in one.items()} for one in kept]
    if alike:
        new: list[CompressorState] = [summable_state(one) for one in slots]
    else:
        new = [redistribute(slots, ranks)] * ranks
    return [{k: {n: torch.from_numpy(a) for n, a in v.items()} for k, v in x.items()} for x in new]


def _load_compressor_state(
    shapes: dict[str, dict[str, list[int]]],
    kept: list[CompressorTensors],
    reader: int,
    run: Resumable,
) -> CompressorState:
    """This rank's, of what the reader has of all."""
    places = [(kind, name) for kind in shapes for name in shapes[kind]]
    empty = [torch.empty(shapes[kind][name], dtype=torch.float32) for kind, name in places]
    everybodys = [empty] * run.world.size
    if run.world.rank == reader and kept:
        everybodys = [[one[kind][name] for kind, name in places] for one in kept]
    run.collectives.scatter(reader, everybodys)
    own = _by_kind(places, everybodys[run.world.rank])
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
    """What an object says to a state that isn't its own, in a sentence."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"checkpoint {found} doesn't fit this {kind} ({reason})",
            "resume with what wrote it, or name another",
        ) from None


def _refuse_another(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer takes any settings, and misses its own at its next step."""
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
    """The newest checkpoint of which every byte is sound; None if there is none yet. Those that are
    damaged are passed over, each with a warning. CheckpointError if all are, if the newest needs a
    newer Thalweg, or if what is there isn't Thalweg's."""
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
                log.warning("%s; the run goes on from %s", damage.problem, path)
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
    """Also one folder further down, as trainers put them; hidden ones are what killed writers left
    behind."""
    for pattern in ("*", "*/*"):
        for file in sorted(directory.glob(pattern)):
            hidden = any(part.startswith(".") for part in file.relative_to(directory).parts)
            if file.suffix in MODEL_FILE_SUFFIXES and not hidden:
                yield file

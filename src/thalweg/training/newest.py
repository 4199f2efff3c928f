"""Which checkpoint a run goes on from: the newest in its folder of which every byte is sound.

Those that are damaged are passed over, each with a warning. A folder in which somebody else keeps
a model isn't taken for an empty one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from thalweg.errors import CheckpointError
from thalweg.training.checkpoint import Checkpoint, NewerFormat, checkpoints_in, read

MODELS = {".bin", ".ckpt", ".pt", ".pth", ".safetensors"}
log = logging.getLogger("thalweg")


def newest(directory: Path) -> tuple[Path, Checkpoint] | None:
    """None if there is no checkpoint yet. CheckpointError if all are damaged, if the newest needs a
    newer Thalweg, or if what is there isn't Thalweg's."""
    passed_over: list[CheckpointError] = []
    for path in checkpoints_in(directory):
        try:
            found = read(path)
        except NewerFormat:
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
            if file.suffix in MODELS and not hidden:
                yield file

"""A checkpoint of a run in a folder: written as a whole or not at all, and verified when read.

    <directory>/step-00000020/      checkpoint.json  model.safetensors  optimizer.safetensors
                                    state.safetensors  ranks.safetensors

It carries a snapshot; `state.safetensors` has the state= objects, and `ranks.safetensors` the own
state of each rank. `checkpoint.json` holds everything that isn't a tensor, and the length and
SHA-256 of every file, itself included. A folder is written and synced under a hidden name,
`.step-00000020@host@pid`, and then renamed; it loses its visible name before its files are removed.
So a folder with a visible name is complete whenever the writer is killed, and a hidden one is a
leftover once its writer is gone.

A step that exists already is replaced by way of `step-00000020.new`, which counts as newer: at each
moment one of the two is complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from socket import gethostname
from typing import Any

import psutil
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from thalweg.errors import CheckpointError
from thalweg.training.data.position import BatchIndex
from thalweg.training.snapshot import RankState, Snapshot
from thalweg.training.state_encoding import MISREAD_ERRORS, pack, unpack

CHECKPOINT_FORMAT = 1
ABANDONED_WRITER_SECONDS = 60.0  # since another host's writer last wrote
_KIND = "thalweg checkpoint"
_INDEX = "checkpoint.json"
_PARTS = {"model": "model", "optimizer": "optimizer", "state": "objects", "ranks": "ranks"}
"""The field of a snapshot in each file."""
_VISIBLE = re.compile(r"step-(\d{8,})(\.new)?")
_HIDDEN = re.compile(r"\.step-\d{8,}(?:\.new)?@(?P<host>.+)@(?P<pid>\d+)")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
Identity = tuple[int, int]


def write(
    directory: Path,
    snapshot: Snapshot,
    *,
    version: str,
    keep: int = 2,
    fence: Callable[[], None] = lambda: None,
) -> Path:
    """Add a checkpoint, written by this version of Thalweg, and keep the newest `keep`.

    Any failure is a CheckpointError, and leaves the earlier checkpoints as they were. One process
    at a time should write to a directory. A writer that was suspended may continue when another has
    written there: `fence` raises if this process isn't the writer any more, and it neither replaces
    nor removes folders that it hasn't found at its beginning.
    """
    if keep < 1:
        raise CheckpointError(f"keep={keep} keeps no checkpoint", "keep 1 or more")
    fields = snapshot.packed()
    packed = {part: pack(fields[field], part) for part, field in _PARTS.items()}
    path = directory / f"step-{snapshot.step:08d}"
    with _explained(path):
        if not directory.exists():
            directory.mkdir(parents=True, exist_ok=True)
            _sync(directory.parent)
        _tidy(directory)
        found = {_identity(path) for path in checkpoints_in(directory)}
        # A killed writer has left more than `keep`: a disk with space for one more would be full.
        _remove_older(directory, keep, found)
        hidden = _hidden(path)
        hidden.mkdir()
        try:
            _fill(hidden, snapshot, packed, version)
            fence()
            if path.exists() and _identity(path) not in found:
                raise CheckpointError(
                    f"can't write checkpoint {path}: another process has written it meanwhile",
                    "let one job at a time write to a directory",
                )
            _publish(hidden, path)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        fence()
        _remove_older(directory, keep - 1, found, written=path)
    return path


def read(path: Path) -> Snapshot:
    """The snapshot in this folder, every byte of it verified."""
    index = _index(path)
    fields: dict[str, Any] = {}
    with _readable(path):
        for part, field in _PARTS.items():
            file = path / f"{part}.safetensors"
            _verify(file, index)
            # cloned: load_file maps the file, which a later write removes
            tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
            fields[field] = unpack(index["trees"][part], tensors)
        sampling = dict(index["position"])
        position = BatchIndex(epoch=sampling.pop("epoch"), batch=sampling.pop("batch"))
        fields["ranks"] = [RankState.of(rank) for rank in fields["ranks"]]
        return Snapshot(
            step=index["step"], plan=index["plan"], position=position, sampling=sampling, **fields
        )


def _fill(
    folder: Path,
    snapshot: Snapshot,
    packed: dict[str, tuple[Any, dict[str, Tensor]]],
    version: str,
) -> None:
    mode = folder.stat().st_mode & 0o666
    files = {}
    for part, (_, tensors) in packed.items():
        file = folder / f"{part}.safetensors"
        save_file(tensors, file)
        file.chmod(mode)  # save_file restricts it to its owner
        _sync(file)
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
    content = {
        "thalweg": version,
        "step": snapshot.step,
        "plan": snapshot.plan,
        "size": len(snapshot.ranks),  # the number of workers
        "position": {**asdict(snapshot.position), **snapshot.sampling},
        "model": {
            name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            for name, tensor in packed["model"][1].items()
        },
        "files": files,
        "trees": {part: tree for part, (tree, _) in packed.items()},
    }
    index = {
        "kind": _KIND,
        "format": CHECKPOINT_FORMAT,
        "sha256": _seal(CHECKPOINT_FORMAT, content),
        "content": content,
    }
    file = folder / _INDEX
    file.write_text(json.dumps(index, indent=1), encoding="utf-8")
    _sync(file)
    _sync(folder)


def _publish(hidden: Path, path: Path) -> None:
    """Give a complete folder its visible name, replacing an older one of that step."""
    if path.exists():
        new = path.with_name(f"{path.name}.new")
        if new.exists():  # it is damaged, or _tidy had renamed it
            _remove(new)
        _rename(hidden, new)
        _remove(path)
        hidden = new
    _rename(hidden, path)


def _tidy(directory: Path) -> None:
    """Remove the leftovers of killed writers, and complete the replacements that they began."""
    for entry in sorted(directory.iterdir()):
        writer = _HIDDEN.fullmatch(entry.name)
        if writer and _is_left_behind(entry, writer["host"], int(writer["pid"])):
            shutil.rmtree(entry, ignore_errors=True)
        visible = _VISIBLE.fullmatch(entry.name)
        if visible and visible[2] and _is_good(entry):
            path = entry.with_suffix("")
            if path.exists():
                _remove(path)
            _rename(entry, path)


def _remove_older(
    directory: Path, keep: int, found: set[Identity], written: Path | None = None
) -> None:
    """Remove checkpoints among those found, all but the newest `keep` complete ones. Unless the
    newest is the one `written` just now, these are verified in every byte: newer checkpoints may be
    damaged, and the next write may fail."""
    with suppress(CheckpointError, OSError):  # the next write tries again
        paths = [path for path in checkpoints_in(directory) if not path.suffix]  # see _tidy
        thorough = paths[:1] != [written]
        older = [path for path in paths if _identity(path) in found]
        if len(older) > keep:
            complete = [path for path in older if _is_good(path, in_every_byte=thorough)]
            for path in complete[keep:]:
                _remove(path)


def _identity(path: Path) -> Identity:
    """Inode and time of a folder, which distinguish it from another of that name; zeros if it was
    just removed."""
    with suppress(FileNotFoundError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return 0, 0


def _is_left_behind(entry: Path, host: str, pid: int) -> bool:
    """True if the writer is a process of this host that is gone; or of another host, and has not
    written for a while by the file server's clock."""
    if host == gethostname():  # this process isn't writing yet
        return pid == os.getpid() or not psutil.pid_exists(pid)
    os.utime(entry.parent)
    now = entry.parent.stat().st_mtime
    with suppress(FileNotFoundError):  # it was renamed or removed
        written = max(path.stat().st_mtime for path in (entry, *entry.iterdir()))
        return now - written > ABANDONED_WRITER_SECONDS
    return False


def checkpoints_in(directory: Path) -> list[Path]:
    """All checkpoints of a directory, the newest first, including damaged ones."""
    try:
        names = [entry.name for entry in directory.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"can't look for checkpoints in {directory}: {error.strerror}",
            "name the directory that they were written to",
        ) from None
    matches = [match for name in names if (match := _VISIBLE.fullmatch(name))]
    matches.sort(key=lambda match: (int(match[1]), match[2] is not None), reverse=True)
    return [directory / match[0] for match in matches]


def _index(path: Path) -> dict[str, Any]:
    """The content of checkpoint.json, if it is sound and the files have the lengths in it."""
    with _readable(path):
        try:
            index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        except ValueError:
            raise _damaged(path, f"{_INDEX} isn't JSON") from None
        if not isinstance(index, dict) or index.get("kind") != _KIND:
            raise CheckpointError(
                f"{path} is no checkpoint of Thalweg: {_INDEX} has another kind",
                "name a folder that Thalweg wrote",
            )
        if index["format"] > CHECKPOINT_FORMAT:
            raise NewerFormat(
                f"checkpoint {path} has format {index['format']}, and this Thalweg reads "
                f"{CHECKPOINT_FORMAT}",
                "read it with the Thalweg that wrote it, or a newer one",
            )
        content: dict[str, Any] = index["content"]
        if index["sha256"] != _seal(index["format"], content):
            raise _damaged(path, f"{_INDEX} isn't what was written")
        for name, file in content["files"].items():
            length = (path / name).stat().st_size
            if length != file["bytes"]:
                raise _damaged(path, f"{name} has {length} bytes of {file['bytes']}")
        return content


def _is_good(path: Path, *, in_every_byte: bool = True) -> bool:
    """True if the index is sound, the files have the right lengths, and every byte is as it was
    written."""
    with suppress(CheckpointError), _readable(path):
        index = _index(path)
        for part in _PARTS if in_every_byte else ():
            _verify(path / f"{part}.safetensors", index)
        return True
    return False


def _verify(file: Path, index: dict[str, Any]) -> None:
    if _digest(file) != index["files"][file.name]["sha256"]:
        raise _damaged(file.parent, f"{file.name} isn't what was written")


class NewerFormat(CheckpointError):
    pass


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} is damaged: {problem}",
        "resume from an older checkpoint, or start again without one",
    )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        missing = Path(error.filename or path).name
        if isinstance(error, FileNotFoundError):
            raise _damaged(path, f"it has no {missing}") from None
        raise CheckpointError(
            f"can't read {missing} of checkpoint {path}: {error.strerror}",
            "let this user read it, or name another",
        ) from None
    except MISREAD_ERRORS:
        raise _damaged(path, f"{_INDEX} lacks what it should hold") from None


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Convert OSErrors, also those that safetensors has only as text, to errors with a remedy."""
    try:
        yield
    except OSError as error:
        code, reason = error.errno, error.strerror or str(error)
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        code = int(number[1]) if number else None
        reason = os.strerror(code) if code else " ".join(str(error).split())
    else:
        return
    if code in _FULL:
        remedy = "make room there, or keep fewer; earlier checkpoints are as they were"
    elif code in (errno.ENOTDIR, errno.EEXIST):
        remedy = "name a directory, not a file"
    else:
        remedy = (
            "name a directory that this user can write to; earlier checkpoints are as they were"
        )
    raise CheckpointError(f"can't write checkpoint {path}: {reason}", remedy)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}@{gethostname()}@{os.getpid()}")


def _remove(path: Path) -> None:
    """Remove the visible name first, so that a partial folder is never visible."""
    hidden = _hidden(path)
    _rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _rename(path: Path, target: Path) -> None:
    path.rename(target)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk; some file systems don't support this for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _seal(form: int, content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([form, content]).encode()).hexdigest()

"""A small disk for checkpoints that can be filled, and whose files can be corrupted.

It is a tmpfs that is unmounted as soon as it is open: no path leads to it but the descriptor, which
workers inherit, and the kernel frees it when the last of them ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryDirectory

from thalweg.errors import CheckpointError, UsageError
from thalweg.training.checkpoint import checkpoints_in, read

DISK_MEGABYTES = 16  # enough for a few checkpoints of any plan
MNT_DETACH = 2
DISK_FILL_CHUNK_BYTES = 1 << 16
FILLER_FILE_NAME = "filler"


class Disk:
    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with TemporaryDirectory(prefix="thalweg-disk-") as place:
            target = os.fsencode(place)
            options = f"size={DISK_MEGABYTES}m".encode()
            if libc.mount(b"tmpfs", target, b"tmpfs", 0, options) != 0:
                raise UsageError(
                    f"mounting a tmpfs for checkpoints failed: {os.strerror(ctypes.get_errno())}",
                    "run it with sudo, or leave out the kinds disk and corrupt",
                )
            self._descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            libc.umount2(target, MNT_DETACH)

    @property
    def _root(self) -> Path:
        return Path(f"/proc/self/fd/{self._descriptor}")

    @property
    def checkpoints(self) -> Path:
        """The checkpoint folder as this process or a fork of it sees it."""
        return self._root / "checkpoints"

    def fill(self) -> None:
        with (self._root / FILLER_FILE_NAME).open("wb", buffering=0) as file:
            for length in (DISK_FILL_CHUNK_BYTES, 512, 1):
                try:
                    while True:
                        file.write(bytes(length))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        (self._root / FILLER_FILE_NAME).unlink(missing_ok=True)

    def flip(self) -> str | None:
        """Flip a byte of the newest checkpoint, if there is one, and return the error that reading
        it raises. The byte is put back: damaged checkpoints would stay and fill the disk."""
        with suppress(OSError, CheckpointError):
            newest = next(iter(checkpoints_in(self.checkpoints)), None)
            if newest is None:
                return None
            file = newest / "model.safetensors"
            _flip_last_byte(file)
            try:
                read(newest)
            except CheckpointError as error:
                return str(error)
            finally:
                _flip_last_byte(file)
            return "it was read without an error"
        return None  # a worker has replaced it

    def close(self) -> None:
        os.close(self._descriptor)


def _flip_last_byte(file: Path) -> None:
    with file.open("r+b") as stream, mmap(stream.fileno(), 0) as content:
        content[-1] ^= 0xFF

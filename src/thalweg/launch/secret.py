"""The job secret, which the workers of a job share.

It comes from the environment or from a file that only its owner can read. It is never sent: peer
records carry signatures that only its holders can make (`transports/peer_record.py`).
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping

from thalweg.errors import LaunchError

SECRET_VARIABLE = "THALWEG_SECRET"
SECRET_FILE_VARIABLE = "THALWEG_SECRET_FILE"
MIN_SECRET_CHARACTERS = 16
MAX_SECRET_FILE_BYTES = 4096


def find_secret(environment: Mapping[str, str]) -> bytes | None:
    """The secret in the environment or in the file that it names; None without either."""
    text, path = environment.get(SECRET_VARIABLE), environment.get(SECRET_FILE_VARIABLE)
    if text and path:
        raise LaunchError(
            f"{SECRET_VARIABLE} and {SECRET_FILE_VARIABLE} are both set", "unset one of them"
        )
    if path:
        return _long_enough(_read(path), f"{SECRET_FILE_VARIABLE} names {path}, which")
    return _long_enough(text.encode(), SECRET_VARIABLE) if text else None


def new_secret() -> str:
    return secrets.token_hex(32)


def _long_enough(secret: bytes, whose: str) -> bytes:
    if len(secret.strip()) < MIN_SECRET_CHARACTERS:
        raise LaunchError(
            f"{whose} has {len(secret.strip())} characters",
            f"use at least {MIN_SECRET_CHARACTERS} random characters: openssl rand -hex 32",
        )
    return secret.strip()


def _read(path: str) -> bytes:
    """The content of the file; its owner and mode are checked after opening, against a race."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise LaunchError(
            f"{SECRET_FILE_VARIABLE} names {path}: {error.strerror}", "name an existing file"
        ) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise LaunchError(f"{path} isn't a regular file", "name one that holds the secret")
        if status.st_uid != os.geteuid():
            raise LaunchError(f"{path} belongs to another user", "make a copy of your own")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise LaunchError(
                f"others than its owner have permissions for {path}", f"run chmod 600 {path}"
            )
        return os.read(descriptor, MAX_SECRET_FILE_BYTES)
    finally:
        os.close(descriptor)

"""What of a lab is still on this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

NAMESPACES = Path("/var/run/netns")
FOLDERS = Path("/run/thalweg/labs")
MARK = "THALWEG_LAB_TEST"


def interfaces() -> set[str]:
    """Of this namespace, which is the machine's own."""
    return {entry.name for entry in Path("/sys/class/net").iterdir()}


class Traces:
    """Taken while a lab is up; says later what is left of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._inodes = {path.stat().st_ino for path in _namespaces(name)}
        assert self._inodes
        self._interfaces = interfaces()

    def left(self) -> list[str]:
        within = [f"process {pid}" for pid in _processes() if _network_of(pid) in self._inodes]
        more = [f"interface {new}" for new in interfaces() - self._interfaces]
        return named_remains(self.name) + within + more


def named_remains(name: str) -> list[str]:
    """Namespaces and the folder of a lab by its name."""
    found = [f"namespace {path.name}" for path in _namespaces(name)]
    return found + ([f"folder {name}"] if (FOLDERS / name).exists() else [])


def marked(mark: str) -> list[int]:
    """Processes that were started with this mark in their environment, and forks of them."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for pid in _processes():
        with suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Or until only a hang could take longer."""
    deadline = monotonic() + seconds
    while not condition():
        assert monotonic() < deadline
        sleep(0.02)


def _namespaces(name: str) -> list[Path]:
    if not NAMESPACES.exists():
        return []
    return [path for path in NAMESPACES.iterdir() if path.name.startswith(f"thalweg.{name}.")]


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _network_of(pid: int) -> int | None:
    with suppress(OSError):
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    return None

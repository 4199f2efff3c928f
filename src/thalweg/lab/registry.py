"""The registry of labs: a folder for each, with its cluster, its owner and its changed links.

A lab with an owner lives as long as that process; `sweep` removes those whose owner has ended. A
lab without one, as `thalweg lab up` makes, lives until it is taken down. The folder exists from
before the first namespace is made until after the last is removed. It appears and disappears
atomically: while it is written or deleted its name is a dot and a process id.

Several processes make, use and remove labs at once, and the name of a removed lab is free again. So
a process that changes or removes a lab locks its folder, and then checks that the lab of that name
is still the same.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from tempfile import mkdtemp
from typing import Any, NamedTuple

import psutil

from thalweg.errors import LabError
from thalweg.facts import Cluster, format_cluster, parse_cluster
from thalweg.lab.addressing import Wiring
from thalweg.lab.namespaces import refused

LAB_REGISTRY_PATH = Path("/run/thalweg/labs")
CLUSTER_FILE, HOSTS_FILE = "cluster.toml", "hosts"
MAX_LABS = 1000
PROCESS_GONE = -1


@dataclass(slots=True, kw_only=True)
class LabChanges:
    """Differences from the declared cluster, by the text of the link."""

    rates: dict[str, str] = field(default_factory=dict)
    cuts: list[str] = field(default_factory=list)
    flows: dict[str, list[int]] = field(default_factory=dict)  # process ids


class Owner(NamedTuple):
    """A process; `ticks` distinguishes it from a later process with the same id."""

    pid: int
    created: float  # wall-clock time, which former versions compare
    ticks: int | None = None  # since the start of the machine; a former version wrote none


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRecord:
    """The contents of a lab's folder."""

    name: str
    id: str  # distinguishes it from other labs of this name
    maker: list[int | str]  # the user id, and the folder from which the lab was made
    cluster: Cluster
    loss: float
    netem: bool  # True if uplinks delay and lose packets
    notes: list[str]
    owner: Owner | None

    @property
    def folder(self) -> Path:
        return LAB_REGISTRY_PATH / self.name

    @property
    def wiring(self) -> Wiring:
        return Wiring(self.name, self.cluster)

    def abandoned(self) -> bool:
        if self.owner is None:
            return False
        ticks = process_start_ticks(self.owner.pid)
        return ticks == PROCESS_GONE or self.owner.ticks not in (None, ticks)

    @contextmanager
    def changing(self) -> Iterator[LabChanges]:
        """The changes, locked for this process, and written unless the block raises an error."""
        with self._if_up(), locked_record(self.name) as found:
            if found is None or found.id != self.id:
                raise FileNotFoundError
            state = self.state()
            yield state
            _write_json(self.folder / "state.json", asdict(state))

    def state(self) -> LabChanges:
        with self._if_up():
            return LabChanges(**json.loads((self.folder / "state.json").read_text()))

    @contextmanager
    def _if_up(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise LabError(f"lab {self.name!r} isn't up", "see `thalweg lab status`") from None
        except PermissionError as error:
            raise refused(error) from None


def enrol(
    name: str | None, cluster: Cluster, *, loss: float, netem: bool, notes: list[str]
) -> LabRecord:
    """Register a lab of this process, with this name or the first free one of lab1, lab2, ..."""
    pid = os.getpid()
    try:
        for candidate in [name] if name else (f"lab{n}" for n in range(1, MAX_LABS)):
            record = LabRecord(
                name=candidate,
                id=token_hex(8),
                maker=_maker(),
                cluster=cluster,
                loss=loss,
                netem=netem,
                notes=notes,
                owner=Owner(pid, psutil.Process(pid).create_time(), process_start_ticks(pid)),
            )
            if _write(record):
                return record
    except OSError as error:
        raise refused(error) from None
    raise LabError(
        f"there is a lab {name!r} already" if name else f"there are {MAX_LABS} labs already",
        f"use another name, or take one down with `thalweg lab down --name {name or 'LAB'}`",
    )


def disown(record: LabRecord) -> LabRecord:
    """Keep the lab when this process ends; the caller holds the lock of its record."""
    record = replace(record, owner=None)
    with record._if_up():
        _write_json(record.folder / "lab.json", _properties(record))
    return record


def unregister(name: str) -> None:
    folder = _hidden_folder()
    with suppress(FileNotFoundError):
        (LAB_REGISTRY_PATH / name).rename(folder)
    shutil.rmtree(folder, ignore_errors=True)


def find(name: str) -> LabRecord:
    try:
        properties = json.loads((LAB_REGISTRY_PATH / name / "lab.json").read_text())
        cluster = parse_cluster((LAB_REGISTRY_PATH / name / CLUSTER_FILE).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        known = ", ".join(names()) or "none"
        raise LabError(
            f"there is no lab {name!r}", f"make one with `thalweg lab up`; existing labs: {known}"
        ) from None
    owner = properties.pop("owner")
    return LabRecord(
        name=name,
        cluster=cluster,
        owner=None if owner is None else Owner(*owner),
        **{"id": "", "maker": [-1, "elsewhere"], **properties},  # a former version wrote neither
    )


def names() -> list[str]:
    return sorted(folder.name for folder in LAB_REGISTRY_PATH.glob("[!.]*"))


def only_lab_name() -> str:
    """The name of the only lab that this user made from this folder, first among those without an
    owner."""
    records = _all()
    mine = [record for record in records if record.maker == _maker()]
    stay = [record for record in mine if record.owner is None]
    if len(stay or mine) == 1:
        return (stay or mine)[0].name
    known = ", ".join(f"{record.name} (from {record.maker[1]})" for record in records)
    raise LabError(
        f"which lab? {'there is ' + known if known else 'none is up'}",
        "give --name, or make one with `thalweg lab up`",
    )


def of_this_user() -> list[LabRecord]:
    """The labs that this user made from any folder."""
    return [record for record in _all() if record.maker[0] == _maker()[0]]


def remove_leftovers() -> None:
    """Remove folders that processes were writing or deleting when they ended."""
    for hidden in LAB_REGISTRY_PATH.glob(".*-*"):
        if process_start_ticks(int(hidden.name[1:].partition("-")[0])) == PROCESS_GONE:
            shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def locked_record(name: str, *, wait: bool = True) -> Iterator[LabRecord | None]:
    """The lab of this name, locked for this process; None if there is none, or if another process
    holds the lock and `wait` is False."""
    with ExitStack() as held:
        try:
            descriptor = os.open(LAB_REGISTRY_PATH / name, os.O_RDONLY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            exists = os.path.samestat(os.fstat(descriptor), (LAB_REGISTRY_PATH / name).stat())
        except (FileNotFoundError, NotADirectoryError, BlockingIOError):
            exists = False
        yield _find(name) if exists else None


def _all() -> list[LabRecord]:
    return [record for record in map(_find, names()) if record is not None]


def _find(name: str) -> LabRecord | None:
    with suppress(LabError):  # another process has just taken it down
        return find(name)
    return None


def _maker() -> list[int | str]:
    """The id of this user, also behind sudo, and the current folder."""
    folder = Path("/proc/self/cwd").readlink()  # also if it was deleted
    return [int(os.environ.get("SUDO_UID", os.getuid())), str(folder)]


def _write(record: LabRecord) -> bool:
    """Write a record atomically, or return False if its name is taken."""
    folder = _hidden_folder()
    _write_json(folder / "lab.json", _properties(record))
    _write_json(folder / "state.json", asdict(LabChanges()))
    (folder / CLUSTER_FILE).write_text(format_cluster(record.cluster), encoding="utf-8")
    (folder / HOSTS_FILE).write_text(record.wiring.host_table())
    folder.chmod(0o755)
    try:
        folder.rename(record.folder)
    except OSError as error:
        shutil.rmtree(folder)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _properties(record: LabRecord) -> dict[str, Any]:
    names = ("id", "maker", "owner", "loss", "netem", "notes")
    return {name: getattr(record, name) for name in names}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace the contents of a file atomically."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content))
    new.replace(path)


def _hidden_folder() -> Path:
    LAB_REGISTRY_PATH.mkdir(parents=True, exist_ok=True)
    return Path(mkdtemp(prefix=f".{os.getpid()}-", dir=LAB_REGISTRY_PATH))


def process_start_ticks(pid: int) -> int:
    """The start of a process in ticks since the start of the machine, or `PROCESS_GONE` if it has
    ended, also if its parent hasn't waited for it."""
    with suppress(FileNotFoundError, ProcessLookupError):
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return PROCESS_GONE if state in "ZX" else int(numbers[18])
    return PROCESS_GONE

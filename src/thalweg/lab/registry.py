"""Which labs there are, in a folder each: its cluster, its owner, and what was changed in it.

A lab with an owner lives as long as that process; `sweep` finds those whose owner is gone. One
without, as `thalweg lab up` leaves it, lives until it is taken down. The folder is there before the
first namespace is made and goes after the last one, so nothing of a lab is ever without it. It
comes and goes whole: while it is written and deleted its name is a dot and who does that.

Several processes make, use and remove labs at once, and a name is free again when a lab is gone. So
whoever changes or removes one holds the lock of its folder, and then looks whether the lab that now
has the name is still the one that was meant.
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
MAX_LABS = 1000
PROCESS_GONE = -1


@dataclass(slots=True, kw_only=True)
class LabChanges:
    """What differs from the cluster as it was declared; links by their text."""

    rates: dict[str, str] = field(default_factory=dict)
    cuts: list[str] = field(default_factory=list)
    flows: dict[str, list[int]] = field(default_factory=dict)  # process ids


class Owner(NamedTuple):
    """A process. Its number may be used again, and clocks are set: `ticks` tells which it was."""

    pid: int
    created: float  # by the clock: what former versions compare
    ticks: int | None = None  # from the start of the machine; a former version wrote none


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRecord:
    """A lab's folder."""

    name: str
    id: str  # what tells it from another lab that had or gets this name
    maker: list[int | str]  # the user who made it, and the folder from which
    cluster: Cluster
    loss: float
    netem: bool  # whether uplinks delay and lose
    notes: list[str]
    owner: Owner | None

    @property
    def cluster_file(self) -> Path:
        return LAB_REGISTRY_PATH / self.name / "cluster.toml"

    @property
    def hosts_file(self) -> Path:
        return LAB_REGISTRY_PATH / self.name / "hosts"

    def abandoned(self) -> bool:
        if self.owner is None:
            return False
        ticks = process_start_ticks(self.owner.pid)
        return ticks == PROCESS_GONE or self.owner.ticks not in (None, ticks)

    @contextmanager
    def changing(self) -> Iterator[LabChanges]:
        """The state, for one process at a time; kept unless an error leaves."""
        with self._being_up(), locked_record(self.name) as there:
            if there is None or there.id != self.id:
                raise FileNotFoundError
            state = self.state()
            yield state
            _put(self._state_file, asdict(state))

    def state(self) -> LabChanges:
        with self._being_up():
            return LabChanges(**json.loads(self._state_file.read_text()))

    @property
    def _state_file(self) -> Path:
        return LAB_REGISTRY_PATH / self.name / "state.json"

    @contextmanager
    def _being_up(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise LabError(f"lab {self.name!r} isn't up", "see `thalweg lab status`") from None
        except PermissionError as error:
            raise refused(error) from None


def enrol(
    name: str | None,
    cluster: Cluster,
    *,
    loss: float,
    netem: bool,
    notes: list[str],
) -> LabRecord:
    """A new lab of this process, under this name or the first of lab1, lab2, ... that is free."""
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
                owner=Owner(
                    os.getpid(), psutil.Process().create_time(), process_start_ticks(os.getpid())
                ),
            )
            if _write(record):
                return record
    except OSError as error:
        raise refused(error) from None
    raise LabError(
        f"there is a lab {name!r} already" if name else f"there are {MAX_LABS} labs already",
        f"take another name, or take one down with `thalweg lab down --name {name or 'LAB'}`",
    )


def disown(record: LabRecord) -> LabRecord:
    """It stays when this process ends. Who does this has the lab in hand."""
    record = replace(record, owner=None)
    with record._being_up():
        _put(LAB_REGISTRY_PATH / record.name / "lab.json", _about(record))
    return record


def unregister(name: str) -> None:
    folder = _hidden_folder()
    with suppress(FileNotFoundError):
        (LAB_REGISTRY_PATH / name).rename(folder)
    shutil.rmtree(folder, ignore_errors=True)


def find(name: str) -> LabRecord:
    try:
        about = json.loads((LAB_REGISTRY_PATH / name / "lab.json").read_text())
        cluster = parse_cluster(
            (LAB_REGISTRY_PATH / name / "cluster.toml").read_text(encoding="utf-8")
        )
    except (FileNotFoundError, NotADirectoryError):
        there = ", ".join(names()) or "none"
        raise LabError(
            f"there is no lab {name!r}", f"make one with `thalweg lab up`; there is: {there}"
        ) from None
    owner = about["owner"]
    return LabRecord(
        name=name,
        id=about.get("id", ""),
        maker=about.get("maker", [-1, "elsewhere"]),
        cluster=cluster,
        loss=about["loss"],
        netem=about["netem"],
        notes=about["notes"],
        owner=None if owner is None else Owner(*owner),
    )


def names() -> list[str]:
    with suppress(FileNotFoundError):
        return sorted(
            path.name for path in LAB_REGISTRY_PATH.iterdir() if not path.name.startswith(".")
        )
    return []


def only_lab_name() -> str:
    """The name of the only lab that this user made from this folder and that stays, or else of the
    only one that they made at all."""
    there = _all()
    mine = [record for record in there if record.maker == _maker()]
    stay = [record for record in mine if record.owner is None]
    if len(stay or mine) == 1:
        return (stay or mine)[0].name
    known = ", ".join(f"{record.name} (from {record.maker[1]})" for record in there)
    raise LabError(
        f"which lab? {'there is ' + known if known else 'none is up'}",
        "give --name, or make one with `thalweg lab up`",
    )


def of_this_user() -> list[LabRecord]:
    """The labs that this user made, from whatever folder."""
    return [record for record in _all() if record.maker[0] == _maker()[0]]


def remove_leftovers() -> None:
    """Folders that processes were writing or deleting when they ended."""
    for hidden in LAB_REGISTRY_PATH.glob(".*-*"):
        if process_start_ticks(int(hidden.name[1:].partition("-")[0])) == PROCESS_GONE:
            shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def locked_record(name: str, *, wait: bool = True) -> Iterator[LabRecord | None]:
    """The lab that has this name, for one process at a time; None if there is none, or if another
    process has it in hand and this one isn't to wait."""
    with ExitStack() as held:
        try:
            descriptor = os.open(LAB_REGISTRY_PATH / name, os.O_RDONLY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            is_there = os.path.samestat(os.fstat(descriptor), (LAB_REGISTRY_PATH / name).stat())
        except (FileNotFoundError, NotADirectoryError, BlockingIOError):
            is_there = False
        yield _found(name) if is_there else None


def _all() -> list[LabRecord]:
    return [record for name in names() if (record := _found(name)) is not None]


def _found(name: str) -> LabRecord | None:
    with suppress(LabError):  # it has just been taken down
        return find(name)
    return None


def _maker() -> list[int | str]:
    """This user, also behind sudo, and this folder."""
    folder = Path("/proc/self/cwd").readlink()  # as it was called last, if it is gone
    return [int(os.environ.get("SUDO_UID", os.getuid())), str(folder)]


def _write(record: LabRecord) -> bool:
    """All of the folder at once, or False if there is one by that name."""
    folder = _hidden_folder()
    _put(folder / "lab.json", _about(record))
    _put(folder / "state.json", asdict(LabChanges()))
    (folder / "cluster.toml").write_text(format_cluster(record.cluster), encoding="utf-8")
    (folder / "hosts").write_text(Wiring(record.name, record.cluster).host_table())
    folder.chmod(0o755)
    try:
        folder.rename(LAB_REGISTRY_PATH / record.name)
    except OSError as error:
        shutil.rmtree(folder)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _about(record: LabRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "maker": record.maker,
        "owner": record.owner,
        "loss": record.loss,
        "netem": record.netem,
        "notes": record.notes,
    }


def _put(path: Path, content: dict[str, Any]) -> None:
    """All of it or, whatever comes between, nothing."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content))
    new.replace(path)


def _hidden_folder() -> Path:
    LAB_REGISTRY_PATH.mkdir(parents=True, exist_ok=True)
    return Path(mkdtemp(prefix=f".{os.getpid()}-", dir=LAB_REGISTRY_PATH))


def process_start_ticks(pid: int) -> int:
    """When a process began, in ticks since the start of the machine. One that has ended is gone,
    though nobody may have waited for it."""
    with suppress(FileNotFoundError, ProcessLookupError):
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return PROCESS_GONE if state in "ZX" else int(numbers[18])
    return PROCESS_GONE

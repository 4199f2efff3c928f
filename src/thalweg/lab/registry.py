"""Which labs there are, in a folder each: its cluster, its owner, and what was changed in it.

A lab with an owner lives as long as that process; `sweep` finds those whose owner is gone. One
without, as `thalweg lab up` leaves it, lives until it is taken down. The folder is there before the
first namespace is made and goes after the last one, so nothing of a lab is ever without it. It
comes and goes whole: while it is written and deleted its name is a dot and who does that.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil

from thalweg.errors import LabError
from thalweg.facts import Cluster, format_cluster, read_cluster
from thalweg.lab.namespaces import refused
from thalweg.lab.wiring import Wiring

ROOT = Path("/run/thalweg/labs")
MOST_LABS = 1000
CLOCK_SET = 60.0  # seconds that the time at which a process began may change, with the clock
GONE = -1.0


@dataclass(slots=True, kw_only=True)
class State:
    """What differs from the cluster as it was declared; links by their text."""

    rates: dict[str, str] = field(default_factory=dict)
    cuts: list[str] = field(default_factory=list)
    flows: dict[str, list[int]] = field(default_factory=dict)  # process ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A lab's folder."""

    name: str
    cluster: Cluster
    loss: float
    netem: bool  # whether uplinks delay and lose
    notes: list[str]
    owner: tuple[int, float] | None  # process id, and when that began

    @property
    def cluster_file(self) -> Path:
        return ROOT / self.name / "cluster.toml"

    @property
    def hosts_file(self) -> Path:
        return ROOT / self.name / "hosts"

    def abandoned(self) -> bool:
        return self.owner is not None and abs(began(self.owner[0]) - self.owner[1]) > CLOCK_SET

    @contextmanager
    def changing(self) -> Iterator[State]:
        """The state, for one process at a time; kept unless an error leaves."""
        with self._being_up(), _locked(ROOT / self.name):
            state = self.state()
            yield state
            _put(self._state_file, asdict(state))

    def state(self) -> State:
        with self._being_up():
            return State(**json.loads(self._state_file.read_text()))

    @property
    def _state_file(self) -> Path:
        return ROOT / self.name / "state.json"

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
) -> Record:
    """A new lab of this process, under this name or the first of lab1, lab2, ... that is free."""
    try:
        for candidate in [name] if name else (f"lab{n}" for n in range(1, MOST_LABS)):
            record = Record(
                name=candidate,
                cluster=cluster,
                loss=loss,
                netem=netem,
                notes=notes,
                owner=(os.getpid(), began(os.getpid())),
            )
            if _write(record):
                return record
    except OSError as error:
        raise refused(error) from None
    raise LabError(
        f"there is a lab {name!r} already" if name else f"there are {MOST_LABS} labs already",
        "take another name, or take that one down with `thalweg lab down`",
    )


def disown(record: Record) -> Record:
    """It stays when this process ends."""
    record = replace(record, owner=None)
    _put(ROOT / record.name / "lab.json", _about(record))
    return record


def strike_off(name: str) -> None:
    folder = _hidden_folder()
    with suppress(FileNotFoundError):
        (ROOT / name).rename(folder)
    shutil.rmtree(folder, ignore_errors=True)


def find(name: str) -> Record:
    try:
        about = json.loads((ROOT / name / "lab.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        there = ", ".join(names()) or "none"
        raise LabError(
            f"there is no lab {name!r}", f"make one with `thalweg lab up`; there is: {there}"
        ) from None
    owner = about["owner"]
    return Record(
        name=name,
        cluster=read_cluster(ROOT / name / "cluster.toml"),
        loss=about["loss"],
        netem=about["netem"],
        notes=about["notes"],
        owner=None if owner is None else (owner[0], owner[1]),
    )


def names() -> list[str]:
    with suppress(FileNotFoundError):
        return sorted(path.name for path in ROOT.iterdir() if not path.name.startswith("."))
    return []


def the_only_one() -> str:
    """The name of the only lab that stays, or else of the only one there is."""
    there = names()
    stay = [name for name in there if find(name).owner is None]
    if len(stay or there) == 1:
        return (stay or there)[0]
    known = f"there are {', '.join(there)}" if there else "none is up"
    raise LabError(f"which lab? {known}", "give --name, or make one with `thalweg lab up`")


@contextmanager
def abandoned() -> Iterator[list[str]]:
    """Labs whose owner is gone. While one process removes them no other looks for them, or it would
    remove a new lab that has got the name."""
    ROOT.mkdir(parents=True, exist_ok=True)
    with _locked(ROOT):
        for hidden in ROOT.glob(".*-*"):
            if began(int(hidden.name[1:].partition("-")[0])) == GONE:
                shutil.rmtree(hidden, ignore_errors=True)
        yield [name for name in names() if _is_abandoned(name)]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """For one process at a time."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_abandoned(name: str) -> bool:
    with suppress(LabError):  # it has just been taken down
        return find(name).abandoned()
    return False


def _write(record: Record) -> bool:
    """All of the folder at once, or False if there is one by that name."""
    folder = _hidden_folder()
    _put(folder / "lab.json", _about(record))
    _put(folder / "state.json", asdict(State()))
    (folder / "cluster.toml").write_text(format_cluster(record.cluster), encoding="utf-8")
    (folder / "hosts").write_text(Wiring(record.name, record.cluster).host_table())
    folder.chmod(0o755)
    try:
        folder.rename(ROOT / record.name)
    except OSError as error:
        shutil.rmtree(folder)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _about(record: Record) -> dict[str, Any]:
    return {
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
    ROOT.mkdir(parents=True, exist_ok=True)
    return Path(mkdtemp(prefix=f".{os.getpid()}-", dir=ROOT))


def began(pid: int) -> float:
    """When a process began. One that has ended is gone, though nobody may have waited for it."""
    try:
        process = psutil.Process(pid)
        return GONE if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return GONE

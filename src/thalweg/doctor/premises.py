"""What this process was given: a cluster file, a secret, an interface, a disk, rights for a lab.

What a run would refuse is told as a finding, and left out, so that the rest can still be looked at.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from thalweg.doctor.finding import Finding
from thalweg.errors import ThalwegError
from thalweg.facts import about, read_cluster
from thalweg.runtime.launch import CLUSTER_VARIABLE, find_cluster
from thalweg.runtime.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, find_secret
from thalweg.runtime.world import INTERFACE_VARIABLES, own_address
from thalweg.transports.protection import CURVE_VARIABLE, wants_curve

LEAST_DISK = 1e9  # bytes: checkpoints are larger
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
STATUS = Path("/proc/self/status")


def accepted(environment: Mapping[str, str]) -> tuple[dict[str, str], list[Finding]]:
    """The environment without what `World.join` would refuse, and what that is."""
    left = dict(environment)
    found = []
    for variable in INTERFACE_VARIABLES:
        try:
            if left.get(variable):
                own_address(None, {variable: left[variable]})
        except ThalwegError as error:
            found.append(_failed("interface", error))
            del left[variable]
    try:
        find_secret(left)
    except ThalwegError as error:
        found.append(_failed("secret", error))
        left = {k: v for k, v in left.items() if k not in (SECRET_VARIABLE, SECRET_FILE_VARIABLE)}
    try:
        wants_curve(left, "127.0.0.1")
    except ThalwegError as error:
        found.append(_failed("secret", error))
        del left[CURVE_VARIABLE]
    return left, found


def cluster_file(size: int, environment: Mapping[str, str]) -> Finding | None:
    """Alone, only whether it can be read: it describes runs, and this is none."""
    path = environment.get(CLUSTER_VARIABLE)
    if not path:
        return None
    try:
        known = read_cluster(Path(path)) if size == 1 else find_cluster(None, size, environment)
    except ThalwegError as error:
        return _failed("cluster file", error)
    detail = f"{CLUSTER_VARIABLE} names {path}: {known.workers} workers"
    return Finding(check="cluster file", verdict="ok", detail=detail)


def disk(folder: Path) -> Finding | None:
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        if free < LEAST_DISK:
            return Finding(
                check="disk",
                verdict="warn",
                detail=f"{about(free, 'B')} are free under {folder}",
                remedy="make room before checkpoints are written there, or start in another folder",
            )
        return Finding(check="disk", verdict="ok", detail=f"{about(free, 'B')} free under {folder}")
    return None


def lab() -> Finding:
    """Whether one can be had here; nobody needs it to train."""
    lacking = _lacking()
    detail = f"none here: {lacking}" if lacking else "clusters can be tried on this machine (--lab)"
    return Finding(check="lab", verdict="ok", detail=detail)


def _lacking() -> str:
    if sys.platform != "linux" or find_spec("pyroute2") is None:
        return "it needs Linux and pyroute2"
    with suppress(OSError, StopIteration, ValueError):
        line = next(row for row in STATUS.read_text().splitlines() if row.startswith("CapEff"))
        held = int(line.split()[1], 16)
        if not (held >> CAP_NET_ADMIN & 1 and held >> CAP_SYS_ADMIN & 1):
            return "it needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN)"
    return ""


def _failed(check: str, error: ThalwegError) -> Finding:
    return Finding(check=check, verdict="fail", detail=error.problem, remedy=error.remedy)

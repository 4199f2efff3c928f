"""What the system allows a process, against what so many workers need.

Open files, for N workers: 64 for anything, and 4 for each of the N - 1 others: two connections of
ours, one each way, and two of Gloo's. Who hosts the store takes 6 connections from each of the
N workers on top. (Counted in /proc/self/fd: 29 to 44 with up to 8 workers, 2 more for each.)

Buffers: TCP keeps as much under way as its window lets it, at most half of what tcp_rmem allows;
more is needed if rate times round trip, the bandwidth-delay product, is larger (RFC 7323).
"""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from thalweg.doctor.finding import Finding, RankFacts, concerning
from thalweg.facts import about

BASE_OPEN_FILE_COUNT = 64  # open files
OPEN_FILES_PER_PEER = 4
OPEN_FILES_PER_STORE_CLIENT = 6  # of the store
SYSCTL_NET_PATH = Path("/proc/sys/net")
KERNEL_LIMIT_PATHS = {
    "tcp_rmem": SYSCTL_NET_PATH / "ipv4" / "tcp_rmem",
    "tcp_wmem": SYSCTL_NET_PATH / "ipv4" / "tcp_wmem",
    "rmem_max": SYSCTL_NET_PATH / "core" / "rmem_max",
    "wmem_max": SYSCTL_NET_PATH / "core" / "wmem_max",
}
SOMAXCONN_PATH = SYSCTL_NET_PATH / "core" / "somaxconn"


def files_needed(size: int, *, hosts_store: bool = False) -> int:
    return (
        BASE_OPEN_FILE_COUNT
        + OPEN_FILES_PER_PEER * (size - 1)
        + (OPEN_FILES_PER_STORE_CLIENT * size if hosts_store else 0)
    )


def open_files(size: int, *, hosts_store: bool = False) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(size, hosts_store=hosts_store)
    unlimited = soft == resource.RLIM_INFINITY
    if not unlimited and soft < needed:
        raised = hard == resource.RLIM_INFINITY or hard >= needed
        return Finding(
            check="open files",
            verdict="fail",
            detail=f"{soft} may be open, and a worker of {size} needs {needed}: "
            f"{_formula(hosts_store)}",
            remedy=f"run ulimit -n {needed} before starting"
            + ("" if raised else f" as root: the hard limit is {hard}"),
        )
    allowed = "unlimited" if unlimited else str(soft)
    most = (
        ""
        if unlimited or size > 1
        else f", enough for {(soft - BASE_OPEN_FILE_COUNT) // OPEN_FILES_PER_PEER + 1} workers"
    )
    detail = f"{allowed}, and {needed} are needed{most}"
    return Finding(check="open files", verdict="ok", detail=detail)


def _formula(hosts_store: bool) -> str:
    stored = (
        f" and {OPEN_FILES_PER_STORE_CLIENT} for each as the store's host" if hosts_store else ""
    )
    return f"{BASE_OPEN_FILE_COUNT}, {OPEN_FILES_PER_PEER} for each other one{stored}"


def backlog(size: int) -> Finding | None:
    """Of the host of the store, to which all workers connect at once."""
    with suppress(OSError, ValueError):
        allowed = int(SOMAXCONN_PATH.read_text())
        if allowed < size:
            return Finding(
                check="backlog",
                verdict="warn",
                detail=f"net.core.somaxconn is {allowed}, and {size} workers call at once",
                remedy=f"run sysctl -w net.core.somaxconn={max(512, size)} on this host",
            )
        return Finding(check="backlog", verdict="ok", detail=f"net.core.somaxconn is {allowed}")
    return None


def buffers() -> dict[str, int]:
    """The most bytes, by setting; of tcp_rmem and tcp_wmem the last of three."""
    found = {}
    for name, path in KERNEL_LIMIT_PATHS.items():
        with suppress(OSError, ValueError, IndexError):
            found[name] = int(path.read_text().split()[-1])
    return found


def buffers_alone(found: Mapping[str, int]) -> Finding:
    told = ", ".join(f"{name} {about(nbytes, 'B')}" for name, nbytes in found.items())
    return Finding(check="buffers", verdict="ok", detail=told or "this system doesn't tell")


def buffers_for(
    ranks: Sequence[RankFacts],
    rates: Mapping[tuple[int, int], float],
    trips: Mapping[tuple[int, int], float],
) -> list[Finding]:
    """Against rates (bits per second) and round trips (seconds), by sender and receiver."""
    known = {facts.rank: facts for facts in ranks}
    found = []
    largest = 0.0
    for (source, target), rate in rates.items():
        nbytes = rate / 8 * trips.get((source, target), 0.0)
        largest = max(largest, nbytes)
        ends = ((known[source], "tcp_wmem"), (known[target], "tcp_rmem"))
        for facts, setting in ends:
            allowed = facts.buffers.get(setting)
            if allowed is not None and 2 * nbytes > allowed:
                found.append(_too_small(facts, setting, allowed, nbytes))
    if found or not ranks:
        return found
    told = buffers_alone(ranks[0].buffers).detail
    needed = f"; {about(2 * largest, 'B')} are needed for rate x round trip" if rates else ""
    return [Finding(check="buffers", verdict="ok", detail=told + needed)]


def _too_small(facts: RankFacts, setting: str, allowed: int, nbytes: float) -> Finding:
    wanted = 1 << (int(4 * nbytes) - 1).bit_length()
    return Finding(
        check="buffers",
        verdict="warn",
        detail=f"net.ipv4.{setting} allows {about(allowed, 'B')}, and rate x round trip is "
        f"{about(nbytes, 'B')}: TCP can't fill the link",
        remedy=f"run sysctl -w net.ipv4.{setting}='4096 131072 {wanted}'",
        **concerning(facts),
    )

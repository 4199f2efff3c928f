"""Creates, enters and removes network namespaces, and finds the processes in them.

They have names in the folder that `ip netns` uses, so that `ip netns exec` can inspect a lab.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

from pyroute2 import netns

from thalweg.errors import LabError
from thalweg.lab.addressing import prefix
from thalweg.launch.worker_process import signals_blocked

NETNS_PATH = Path("/var/run/netns")
CLONE_NEWNS, CLONE_NEWUTS = 0x00020000, 0x04000000
MS_BIND, MS_REC, MS_SLAVE = 1 << 12, 1 << 14, 1 << 19
KILL_TIMEOUT_SECONDS = 10.0  # for killed processes to end


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Run the block with this thread in the namespace. Signals are blocked meanwhile: a thread that
    stayed there would be killed with the lab."""
    with signals_blocked():
        original = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            enter(namespace)
            yield
        finally:
            netns.setns(original)
            os.close(original)


def enter(namespace: str) -> None:
    try:
        netns.setns(namespace, flags=0)
    except OSError as error:
        raise not_entered(namespace, error) from None


def not_entered(namespace: str, error: OSError) -> LabError:
    if error.errno == errno.ENOENT:
        return LabError(f"namespace {namespace} is gone", "take the lab down and up again")
    return refused(error)


def set_host_identity(name: str, hosts: Path) -> None:
    """Give this process the host's name and host table; without the rights to do so it keeps the
    machine's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWUTS) != 0:
        return
    with suppress(OSError):
        socket.sethostname(name)
    # Unmounts still propagate here.
    if libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None) == 0:
        libc.mount(bytes(hosts), b"/etc/hosts", None, MS_BIND, None)


def delete(name: str) -> None:
    with suppress(FileNotFoundError):
        netns.remove(name)


def refused(error: OSError) -> LabError:
    """The error for a lab that this machine can't build."""
    instead = "use local workers without shaping instead (--workers N)"
    if error.errno in (errno.EPERM, errno.EACCES, errno.EBUSY):  # busy: no right to unmount it
        return LabError(
            "the lab needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN) to make network namespaces",
            f"run it with sudo or in a privileged container, or {instead}",
        )
    if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return LabError("this kernel has no network namespaces or virtual interfaces", instead)
    return LabError(f"the lab can't be built: {error.strerror or error}", instead)


def processes(namespaces: list[str]) -> dict[str, list[int]]:
    """The process ids in each of these namespaces."""
    names = {}
    for name in namespaces:
        with suppress(OSError):
            names[(NETNS_PATH / name).stat().st_ino] = name
    pids: dict[str, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                inode = (entry / "ns" / "net").stat().st_ino
                if inode in names:
                    pids[names[inode]].append(int(entry.name))
    return dict(pids)


def remove(lab: str) -> None:
    """Kill the processes and remove the namespaces of a lab, complete or not."""
    names = [name for name in netns.listnetns() if name.startswith(prefix(lab))]
    deadline = monotonic() + KILL_TIMEOUT_SECONDS
    while (left := processes(names)) and monotonic() < deadline:
        for pid in (pid for pids in left.values() for pid in pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        sleep(0.02)
    for name in names:
        delete(name)

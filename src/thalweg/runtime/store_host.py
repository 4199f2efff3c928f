"""The store that workers meet at, in a process of its own.

It outlives every worker, and the supervisor stays a process without threads, which can fork a
worker at any time. The port is told as soon as it is bound: who connects before the store is open
waits in the socket's queue.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

from thalweg.errors import LaunchError, ThalwegError
from thalweg.runtime.forked import fork
from thalweg.runtime.place import Place

BACKLOG = 512


def fork_store(place: Place, guard: int) -> tuple[int, int]:
    """Its process id, and the port at the place's address."""
    reads, writes = os.pipe()
    pid = fork(lambda: _be_store(place, guard, reads, writes))
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    if said.isdigit():
        return pid, int(said)
    os.waitpid(pid, 0)
    problem, _, remedy = said.partition("\n")
    raise LaunchError(problem or "the store's process died", remedy or "start again")


def _be_store(place: Place, guard: int, supervisors: int, told: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        os.write(guard, b"%d\n" % os.getpid())
        for descriptor in (guard, supervisors):
            os.close(descriptor)
        place.enter(None)
        listener = _listener(place.address)
        os.write(told, b"%d" % listener.getsockname()[1])
        os.close(told)
        store = _open(listener, place.address)
        while True:
            signal.pause()
        del store
    except OSError as error:
        problem = f"the store can't listen at {place.address}: {error.strerror}"
        _tell(told, problem, "name an address of this machine")
    except ThalwegError as error:
        _tell(told, error.problem, error.remedy)
    finally:
        os._exit(code)


def _tell(told: int, problem: str, remedy: str) -> None:
    with suppress(OSError):  # it is closed once the store listens
        os.write(told, f"{problem}\n{remedy}".encode())


def _listener(address: str) -> socket.socket:
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, 0), family=family, backlog=BACKLOG)


def _open(listener: socket.socket, address: str) -> object:
    from torch._C._distributed_c10d import TCPStore

    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )

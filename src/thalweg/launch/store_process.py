"""The store that workers meet at, in a process of its own.

It outlives every worker. Should it die all the same, the supervisor starts another at the same
address, which knows nothing, and the members of a run meet there anew. The supervisor itself stays
a process without threads, which can fork a worker at any time. The port is told as soon as it is
bound: who connects before the store is open waits in the socket's queue.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

from thalweg.errors import LaunchError, ThalwegError
from thalweg.launch.place import Place
from thalweg.launch.worker_process import fork

STORE_BACKLOG_COUNT = 512


def fork_store(
    place: Place, guard: int, *, port: int = 0, not_mine: Sequence[int] = ()
) -> tuple[int, int]:
    """Its process id, and the port at the place's address: any, or this one where another store
    was. `not_mine` are the supervisor's own descriptors."""
    reads, writes = os.pipe()
    pid = fork(lambda: _be_store(place, port, (guard, reads, *not_mine), writes))
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    if said.isdigit():
        return pid, int(said)
    os.waitpid(pid, 0)
    problem, _, remedy = said.partition("\n")
    raise LaunchError(problem or "the store's process died", remedy or "start again")


def _be_store(place: Place, port: int, supervisors: Sequence[int], told: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        os.write(supervisors[0], b"%d\n" % os.getpid())
        for descriptor in supervisors:
            os.close(descriptor)
        place.enter(None)
        listener = _listener(place.address, port)
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


def _listener(address: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, port), family=family, backlog=STORE_BACKLOG_COUNT)


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

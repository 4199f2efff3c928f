"""The store of a run: how workers connect to it, and the process that hosts it for a supervisor.

That process outlives every worker. If it dies nevertheless, the supervisor starts another at the
same address, which is empty, and the members of the run rendezvous there. The supervisor itself
stays a process without threads, which can fork a worker at any time. The port is reported as soon
as it is bound: clients that connect before the store is open wait in the socket's queue.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, NoReturn

from thalweg.errors import LaunchError, ThalwegError, TransportError
from thalweg.launch.launcher_variables import RankAssignment
from thalweg.launch.place import Place
from thalweg.launch.worker_process import fork

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STORE_TIMEOUT_SECONDS = 60.0  # of the client in the store's own process
STORE_CONNECT_RETRY_SECONDS = 0.1
STORE_BACKLOG_COUNT = 512  # connections that the store has yet to accept


def open_store(assignment: RankAssignment, timeout: float) -> Store:
    """The key-value store that all workers of this run share; `timeout` limits every wait.

    Its keys have a prefix, as torch's process group may use the same server.
    """
    from torch._C._distributed_c10d import HashStore, PrefixStore

    if assignment.address is None or assignment.port is None:
        return HashStore()
    # If torchrun restarts all workers, the store still has the keys of the ended ones.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = _connected(assignment, assignment.address, assignment.port, timeout)
    return PrefixStore(f"thalweg/{attempt}", store)


def fork_store(place: Place, guard: int, *, port: int, to_close: Sequence[int]) -> tuple[int, int]:
    """Start the store at the place's address; its process id and port. `port` is that of a previous
    store, or 0; `to_close` are the supervisor's descriptors."""
    reads, writes = os.pipe()
    pid = fork(lambda: _be_store(place, port, (guard, reads, *to_close), writes))
    os.close(writes)
    with os.fdopen(reads) as pipe:
        answer = pipe.read()
    if answer.isdigit():
        return pid, int(answer)
    os.waitpid(pid, 0)
    problem, _, remedy = answer.partition("\n")
    raise LaunchError(problem or "the store's process died", remedy or "start again")


def _be_store(place: Place, port: int, supervisors: Sequence[int], answer: int) -> NoReturn:
    try:
        os.setsid()
        os.write(supervisors[0], b"%d\n" % os.getpid())
        for descriptor in supervisors:
            os.close(descriptor)
        place.enter(None)
        listener = _listen(place.address, port)
        port = listener.getsockname()[1]
        os.write(answer, b"%d" % port)
        os.close(answer)
        store = _connect_store(place.address, port, STORE_TIMEOUT_SECONDS, listener, serves=True)
        while True:
            signal.pause()
        del store
    except OSError as error:
        problem = f"the store can't listen at {place.address}: {error.strerror}"
        _report(answer, problem, "name an address of this machine")
    except ThalwegError as error:
        _report(answer, error.problem, error.remedy)
    finally:
        os._exit(1)


def _report(answer: int, problem: str, remedy: str) -> None:
    with suppress(OSError):  # the pipe is closed once the store listens
        os.write(answer, f"{problem}\n{remedy}".encode())


def _connected(assignment: RankAssignment, address: str, port: int, timeout: float) -> Store:
    """A client that connects to the store within `timeout`; on rank 0 also the store, unless the
    launcher hosts it. Torch's client retries beyond its timeout, with stack traces, and waits for
    ever on a server that isn't a store: so this checks the port first, and connects in a thread."""
    serves = assignment.rank == 0 and not assignment.hosted
    deadline = monotonic() + timeout
    listener = None
    if serves:
        with suppress(OSError):  # torch handles an address that is a name, or in use
            listener = _listen(address, port)
    else:
        _wait_for_listener(assignment, address, port, deadline)
    answer: Future[Store] = Future()

    def connect() -> None:
        try:
            answer.set_result(_connect_store(address, port, timeout, listener, serves=serves))
        except Exception as error:
            answer.set_exception(error)

    Thread(target=connect, daemon=True).start()
    try:
        return answer.result(max(deadline - monotonic(), STORE_CONNECT_RETRY_SECONDS))
    except TimeoutError:
        reason: Exception = TimeoutError("the server there doesn't answer as a store")
    except (RuntimeError, ValueError) as error:
        reason = error
    if serves and "EADDRINUSE" in str(reason):
        raise LaunchError(
            f"rank 0 can't host the store: port {port} is in use",
            "set MASTER_PORT to a free one, the same on all workers",
        )
    raise _unreachable(assignment, reason)


def _listen(address: str, port: int) -> socket.socket:
    """A socket that listens at this address alone, where torch would listen on all; OSError for a
    name, which other hosts may resolve differently."""
    numeric = socket.AI_NUMERICHOST
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=numeric)[0][0]
    return socket.create_server((address, port), family=family, backlog=STORE_BACKLOG_COUNT)


def _connect_store(
    address: str, port: int, timeout: float, listener: socket.socket | None, *, serves: bool
) -> Store:
    """A client of the store at this address; with `serves` also the store, which listens at
    `listener` if that is given."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        address,
        port,
        is_master=serves,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,  # torch's process group may use the same port
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _wait_for_listener(
    assignment: RankAssignment, address: str, port: int, deadline: float
) -> None:
    """Wait until a socket listens there; TransportError after the deadline."""
    while True:
        timeout = max(deadline - monotonic(), STORE_CONNECT_RETRY_SECONDS)
        try:
            socket.create_connection((address, port), timeout=timeout).close()
            return
        except OSError as error:
            if monotonic() + STORE_CONNECT_RETRY_SECONDS >= deadline:
                raise _unreachable(assignment, error) from None
            sleep(STORE_CONNECT_RETRY_SECONDS)


def _unreachable(assignment: RankAssignment, reason: Exception) -> TransportError:
    cause = getattr(reason, "strerror", None) or str(reason).partition("\n")[0]
    host = f"the launcher ({assignment.launcher})" if assignment.hosted else "rank 0"
    return TransportError(
        f"rank {assignment.rank} can't reach the store at {assignment.address}:{assignment.port}: "
        f"{cause}",
        f"check that {host} is running, and that no firewall blocks the address",
    )

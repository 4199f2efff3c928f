"""The process that hosts the store of a run.

It outlives every worker. If it dies nevertheless, the supervisor starts another at the same
address, which is empty, and the members of the run rendezvous there. The supervisor itself stays a
process without threads, which can fork a worker at any time. The port is reported as soon as it is
bound: clients that connect before the store is open wait in the socket's queue.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from thalweg.errors import LaunchError, ThalwegError
from thalweg.launch.launcher_variables import connect_store, listen
from thalweg.launch.place import Place
from thalweg.launch.worker_process import fork

STORE_TIMEOUT_SECONDS = 60.0


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
        listener = listen(place.address, port)
        port = listener.getsockname()[1]
        os.write(answer, b"%d" % port)
        os.close(answer)
        store = connect_store(place.address, port, STORE_TIMEOUT_SECONDS, listener, serves=True)
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

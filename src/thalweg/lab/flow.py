"""A competing TCP flow through one link: a process that sends to itself, from one namespace into
the next, as fast as TCP lets it.

A socket stays in the namespace that it was made in, so one process holds both ends.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from contextlib import suppress
from typing import NamedTuple, NoReturn

from thalweg.errors import LabError
from thalweg.facts import Rate
from thalweg.lab.namespaces import enter, processes
from thalweg.runtime.forked import fork

AT_ONCE = 1 << 18  # bytes
PACING_RATE = 47  # SO_MAX_PACING_RATE, which the socket module has no name for
LOOK = 0.5  # seconds after which a flow sees whether its parent is there


class End(NamedTuple):
    namespace: str
    address: str


def start_flow(source: End, target: End, rate: Rate | None, *, detached: bool = False) -> int:
    """From one namespace to another, until it is killed; its process id.

    It ends with the process that started it, unless it is detached.
    """
    reads, writes = os.pipe()
    parent = None if detached else os.getpid()
    pid = fork(lambda: _be_flow(source, target, rate, parent, writes))
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    if said:
        os.waitpid(pid, 0)
        raise LabError(f"no flow to {target.address}: {said}", "is the lab still up?")
    return pid


def stop_flow(pid: int, source: End) -> None:
    """If it still is that flow: process ids are used again."""
    runs = pid in processes([source.namespace]).get(source.namespace, ())
    if runs:
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # another process started it
        os.waitpid(pid, 0 if runs else os.WNOHANG)


def _be_flow(
    source: End, target: End, rate: Rate | None, parent: int | None, told: int
) -> NoReturn:
    try:
        os.setsid()
        _let_go_of_all_but(told)
        sender, listener = _connect(source, target, rate)
        os.close(told)
        _flow(sender, listener, parent)
    except (OSError, LabError) as error:
        with suppress(OSError):  # told long ago that all is well
            os.write(told, str(error).encode())
    finally:
        os._exit(0)


def _let_go_of_all_but(kept: int) -> None:
    """Pipes and sockets of whoever forked us must close when that process ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _connect(source: End, target: End, rate: Rate | None) -> tuple[socket.socket, socket.socket]:
    """The sender, which is on its way, and the listener that waits for it."""
    enter(target.namespace)
    listener = socket.create_server((target.address, 0))
    enter(source.namespace)
    sender = socket.socket()
    sender.bind((source.address, 0))  # or it is the gateway's, which every rack has, too
    sender.setblocking(False)
    if rate is not None:
        pace = min(round(rate.bits_per_second / 8), 2**32 - 2)
        sender.setsockopt(socket.SOL_SOCKET, PACING_RATE, pace)
    sender.connect_ex(listener.getsockname())
    return sender, listener


def _flow(sender: socket.socket, listener: socket.socket, parent: int | None) -> None:
    """Until the parent is gone, or TCP gives up: on a link that is cut it waits, as all do."""
    receiver: socket.socket | None = None
    data, room = bytes(AT_ONCE), bytearray(AT_ONCE)
    while parent is None or os.getppid() == parent:
        readable, writable, _ = select.select([receiver or listener], [sender], [], LOOK)
        with suppress(BlockingIOError):
            if readable and receiver is None:
                receiver, _ = listener.accept()
                receiver.setblocking(False)
            elif readable and receiver is not None:
                receiver.recv_into(room)
        with suppress(BlockingIOError):
            if writable:
                sender.send(data)

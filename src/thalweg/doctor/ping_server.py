"""Where a rank can be called by the others, while they find out who reaches whom.

A caller says the token that this rank has put into the store, so that strangers get nothing, and
what it wants: pings, each answered with this host's time, or to send a flow, which is answered with
its rate. Every wait has a deadline, every call an end.
"""

from __future__ import annotations

import errno
import hmac
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from secrets import token_hex
from threading import BoundedSemaphore, Thread
from time import monotonic, sleep, time
from types import TracebackType
from typing import Self

from thalweg.probing.flow import rate_of

TOKEN_NBYTES = 32
PINGS, FLOW = b"p", b"f"
HELLO = struct.Struct("!32scd")  # token, what is wanted, seconds of a flow
WHO = struct.Struct("!i")  # the rank that answers
NUMBER = struct.Struct("!d")  # a time in seconds, or a rate in bits per second
PATIENCE = 5.0  # seconds for the other side to go on
LONGEST_FLOW = 2.0  # seconds
LARGEST_FLOW = 1 << 26  # bytes
MOST_PINGS = 64
MOST_CALLS = 256  # at a time
BLOCK = 1 << 18
BACKLOG = 512
FOR_A_MOMENT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
PAUSE = 0.05  # seconds
Clock = Callable[[], float]


class Listener:
    """At any port of this address, from the beginning to the end of a `with`."""

    def __init__(self, rank: int, address: str, clock: Clock = time) -> None:
        self.token = token_hex(TOKEN_NBYTES // 2)
        self._rank = rank
        self._clock = clock
        self._room = BoundedSemaphore(MOST_CALLS)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        Thread(target=self._serve, name="doctor", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                call, _ = self._socket.accept()
            except OSError as error:
                if error.errno not in FOR_A_MOMENT:
                    return  # closed
                sleep(PAUSE)
                continue
            if self._room.acquire(blocking=False):
                Thread(target=self._answer, args=(call,), name="call", daemon=True).start()
            else:
                call.close()

    def _answer(self, call: socket.socket) -> None:
        try:
            with call, suppress(OSError, EOFError):
                call.settimeout(PATIENCE)
                call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                token, wanted, seconds = HELLO.unpack(receive(call, HELLO.size))
                if not hmac.compare_digest(token, self.token.encode()):
                    return
                call.sendall(WHO.pack(self._rank))
                if wanted == FLOW:
                    take_flow(call, min(seconds, LONGEST_FLOW))
                else:
                    self._echo(call)
        finally:
            self._room.release()

    def _echo(self, call: socket.socket) -> None:
        for _ in range(MOST_PINGS):
            receive(call, 1)
            call.sendall(NUMBER.pack(self._clock()))


def receive(call: socket.socket, nbytes: int) -> bytes:
    """Exactly so many; EOFError if the other side ends before."""
    parts = bytearray()
    while len(parts) < nbytes:
        part = call.recv(nbytes - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def take_flow(call: socket.socket, seconds: float) -> None:
    """Take in what comes, tell its rate, and drain what was under way, or a reset would overtake
    the answer."""
    start = monotonic()
    arrivals: list[tuple[float, int]] = []
    total = 0
    block = bytearray(BLOCK)
    while total < LARGEST_FLOW and (left := start + seconds - monotonic()) > 0:
        call.settimeout(left)
        try:
            nbytes = call.recv_into(block)
        except TimeoutError:
            break
        if not nbytes:
            break
        total += nbytes
        arrivals.append((monotonic() - start, nbytes))
    lasted = min(seconds, arrivals[-1][0]) if total >= LARGEST_FLOW else seconds
    call.settimeout(PATIENCE)
    call.sendall(NUMBER.pack(rate_of(arrivals, lasted) if arrivals else 0.0))
    deadline = monotonic() + PATIENCE
    while monotonic() < deadline and call.recv_into(block):
        pass

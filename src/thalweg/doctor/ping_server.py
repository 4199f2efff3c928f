"""The server that answers the pings and flows of other ranks.

A caller sends the token that this rank has published in the store, so that other processes get no
answer, and a request: pings, each answered with this host's time, or a flow, which is answered with
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
from typing import Self

from thalweg.probing.flow import rate_of

TOKEN_NBYTES = 32
PINGS_REQUEST, FLOW_REQUEST = b"p", b"f"
PING_HELLO_STRUCT = struct.Struct("!32scd")  # token, request, seconds of a flow
PING_RANK_STRUCT = struct.Struct("!i")  # the rank that answers
PING_NUMBER_STRUCT = struct.Struct("!d")  # a time in seconds, or a rate in bits per second
PEER_READ_TIMEOUT_SECONDS = 5.0
MAX_FLOW_SECONDS = 2.0
MAX_FLOW_BYTES = 1 << 26
MAX_PINGS_PER_CALL = 64
MAX_CONCURRENT_CALLS = 256
FLOW_CHUNK_BYTES = 1 << 18
PING_SERVER_BACKLOG_COUNT = 512
TRANSIENT_ACCEPT_ERRNOS = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.ECONNABORTED,
)
ACCEPT_POLL_SECONDS = 0.05
Clock = Callable[[], float]


class Listener:
    """The server at any port of this address, from the beginning to the end of a `with`."""

    def __init__(self, rank: int, address: str, clock: Clock = time) -> None:
        self.token = token_hex(TOKEN_NBYTES // 2)
        self._rank = rank
        self._clock = clock
        self._free_slots = BoundedSemaphore(MAX_CONCURRENT_CALLS)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server(
            (address, 0), family=family, backlog=PING_SERVER_BACKLOG_COUNT
        )
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        Thread(target=self._serve, name="doctor", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a blocked accept()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                call, _ = self._socket.accept()
            except OSError as error:
                if error.errno not in TRANSIENT_ACCEPT_ERRNOS:
                    return  # closed
                sleep(ACCEPT_POLL_SECONDS)
                continue
            if self._free_slots.acquire(blocking=False):
                Thread(target=self._answer, args=(call,), name="call", daemon=True).start()
            else:
                call.close()

    def _answer(self, call: socket.socket) -> None:
        try:
            with call, suppress(OSError, EOFError):
                call.settimeout(PEER_READ_TIMEOUT_SECONDS)
                call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello = receive(call, PING_HELLO_STRUCT.size)
                token, request, seconds = PING_HELLO_STRUCT.unpack(hello)
                if not hmac.compare_digest(token, self.token.encode()):
                    return
                call.sendall(PING_RANK_STRUCT.pack(self._rank))
                if request == FLOW_REQUEST:
                    receive_flow_and_drain(call, min(seconds, MAX_FLOW_SECONDS))
                else:
                    self._echo(call)
        finally:
            self._free_slots.release()

    def _echo(self, call: socket.socket) -> None:
        for _ in range(MAX_PINGS_PER_CALL):
            receive(call, 1)
            call.sendall(PING_NUMBER_STRUCT.pack(self._clock()))


def receive(call: socket.socket, nbytes: int) -> bytes:
    """Receive exactly `nbytes` bytes; EOFError if the peer ends before."""
    parts = bytearray()
    while len(parts) < nbytes:
        part = call.recv(nbytes - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def receive_number(call: socket.socket) -> float:
    return float(PING_NUMBER_STRUCT.unpack(receive(call, PING_NUMBER_STRUCT.size))[0])


def receive_flow_and_drain(call: socket.socket, seconds: float) -> None:
    """Receive a flow, answer with its rate, and drain the rest, or a reset would overtake the
    answer."""
    start = monotonic()
    arrivals: list[tuple[float, int]] = []
    total = 0
    block = bytearray(FLOW_CHUNK_BYTES)
    while total < MAX_FLOW_BYTES and (left := start + seconds - monotonic()) > 0:
        call.settimeout(left)
        try:
            nbytes = call.recv_into(block)
        except TimeoutError:
            break
        if not nbytes:
            break
        total += nbytes
        arrivals.append((monotonic() - start, nbytes))
    lasted = min(seconds, arrivals[-1][0]) if total >= MAX_FLOW_BYTES else seconds
    call.settimeout(PEER_READ_TIMEOUT_SECONDS)
    call.sendall(PING_NUMBER_STRUCT.pack(rate_of(arrivals, lasted) if arrivals else 0.0))
    deadline = monotonic() + PEER_READ_TIMEOUT_SECONDS
    while monotonic() < deadline and call.recv_into(block):
        pass

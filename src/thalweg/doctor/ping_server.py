"""The server that answers the pings and flows of other ranks.

A caller sends the token that this rank has published in the store, so that other processes get no
answer, and a request: pings, each answered with this host's time, or a flow, which is answered with
its rate. Every wait has a deadline, every call an end.
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from secrets import token_hex
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread, active_count
from time import monotonic, time
from typing import Any, Self

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
STOP_POLL_SECONDS = 0.05
Clock = Callable[[], float]


class PingServer(ThreadingTCPServer):
    """The server at any port of this address, from the beginning to the end of a `with`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(self, rank: int, address: str, clock: Clock = time) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _Call)
        self.rank = rank
        self.clock = clock
        self.token = token_hex(TOKEN_NBYTES // 2)
        self.port: int = self.socket.getsockname()[1]

    def __enter__(self) -> Self:
        Thread(target=self.serve_forever, args=(STOP_POLL_SECONDS,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Hang up if too many calls are being answered, each in a thread."""
        return active_count() <= MAX_CONCURRENT_CALLS


class _Call(StreamRequestHandler):
    server: PingServer
    timeout = PEER_READ_TIMEOUT_SECONDS
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with suppress(OSError, EOFError):
            token, request, seconds = receive(self.connection, PING_HELLO_STRUCT)
            if not hmac.compare_digest(token, self.server.token.encode()):
                return
            self.connection.sendall(PING_RANK_STRUCT.pack(self.server.rank))
            if request == FLOW_REQUEST:
                receive_flow_and_drain(self.connection, min(seconds, MAX_FLOW_SECONDS))
                return
            for _ in range(MAX_PINGS_PER_CALL):
                if not self.connection.recv(1):
                    return
                self.connection.sendall(PING_NUMBER_STRUCT.pack(self.server.clock()))


def receive(call: socket.socket, content: struct.Struct) -> tuple[Any, ...]:
    """Receive the values of this struct; EOFError if the peer ends before."""
    data = bytearray()
    while len(data) < content.size:
        part = call.recv(content.size - len(data))
        if not part:
            raise EOFError
        data += part
    return content.unpack(data)


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

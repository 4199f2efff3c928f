"""Pings and flows from one rank to another, and the server that answers them: reachability, round
trip, clock offset and rate.

A caller sends the token that the other rank has published in the store, so that other processes get
no answer, and a request: pings, each answered with the time of that host, or a flow, which is
answered with its rate. Every wait has a deadline, every call an end.

Of the round trips the shortest counts, as in NTP (RFC 5905, section 10): other work on the hosts
only adds to it. The peer's time, less the middle of that round trip by this host's, is how far its
clock is ahead, with an error of at most half of the round trip.
"""

from __future__ import annotations

import errno
import hmac
import os
import select
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread, active_count
from time import monotonic, perf_counter, time
from typing import Any, Self

from thalweg.doctor.finding import RankFacts
from thalweg.probing.flow import rate_of

PING_OK = "ok"
WRONG_PEER_TEXT = "somebody else has that address here"
PING_TIMEOUTS_SECONDS = (3.0, 5.0)  # of the first and of the second attempt
PING_RTT_COUNT = 8
MAX_CONCURRENT_PINGS = 16
MAX_PINGED_PEERS = 256
MAX_UNSENT_BYTES = 1 << 18  # in the sender's own buffer
ERROR_TEXTS = {
    ConnectionRefusedError: "refused",
    EOFError: "connected, and then broken off",
    ConnectionResetError: "connected, and then broken off",
    TimeoutError: "timed out",
    PermissionError: "forbidden here",
}
NO_ROUTE_ERRNOS = (
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EINVAL,
    errno.ENETDOWN,
    errno.EHOSTDOWN,
)
PINGS_REQUEST, FLOW_REQUEST = b"p", b"f"
PING_HELLO_STRUCT = struct.Struct("!32scd")  # token, request, seconds of a flow
PING_RANK_STRUCT = struct.Struct("!i")  # the rank that answers
PING_NUMBER_STRUCT = struct.Struct("!d")  # a time in seconds, or a rate in bits per second
PEER_READ_TIMEOUT_SECONDS = 5.0
MAX_FLOW_SECONDS = 2.0
MAX_FLOW_BYTES = 1 << 26
MAX_CONCURRENT_CALLS = 256
FLOW_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class PingResult:
    """The outcome of a ping: `PING_OK`, or why it failed; and by how much the peer's clock is ahead
    of the caller's."""

    caller: int
    peer: int
    outcome: str
    round_trip: float = 0.0  # seconds
    ahead: float = 0.0  # seconds


def peers_of(rank: int, ranks: Sequence[int]) -> list[int]:
    """The peers that a rank pings: all others, or the next ones in the circle of very many."""
    place = list(ranks).index(rank)
    return [*ranks[place + 1 :], *ranks[:place]][:MAX_PINGED_PEERS]


def ping_all(caller: int, peers: Sequence[RankFacts]) -> list[PingResult]:
    """Ping all peers, and those that fail a second time: hosts may be busy."""
    results: dict[int, PingResult] = {}
    missing = list(peers)
    with ThreadPoolExecutor(MAX_CONCURRENT_PINGS) as pool:
        for seconds in PING_TIMEOUTS_SECONDS:
            pings = pool.map(partial(ping, caller, patience=seconds), missing)
            results |= {result.peer: result for result in pings}
            missing = [peer for peer in peers if results[peer.rank].outcome != PING_OK]
    return list(results.values())


def max_ping_seconds(number: int) -> float:
    """The longest duration of `ping_all` with this number of peers, in seconds."""
    turns = -(-number // MAX_CONCURRENT_PINGS)
    return turns * 2 * sum(PING_TIMEOUTS_SECONDS)


def ping(caller: int, peer: RankFacts, patience: float) -> PingResult:
    deadline = monotonic() + patience
    samples = []
    try:
        with _connected(peer, PINGS_REQUEST, 0.0, deadline) as call:
            for _ in range(PING_RTT_COUNT):
                call.settimeout(_left(deadline))
                sent, start = time(), perf_counter()
                call.sendall(b".")
                [theirs] = receive(call, PING_NUMBER_STRUCT)
                seconds = perf_counter() - start
                samples.append((seconds, theirs - (sent + seconds / 2)))
    except (OSError, EOFError) as error:
        return PingResult(caller, peer.rank, reason(error))
    return PingResult(caller, peer.rank, PING_OK, *min(samples))


def send_flow(peer: RankFacts, seconds: float, patience: float) -> float | None:
    """Send a flow; return its rate at the peer in bits per second, None without an answer."""
    block = os.urandom(FLOW_CHUNK_BYTES)  # which no tunnel can compress
    deadline = monotonic() + seconds + patience
    try:
        with _connected(peer, FLOW_REQUEST, seconds, deadline) as call:
            call.setblocking(False)
            with suppress(AttributeError):  # only Linux: keep little in this host's own queue
                call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
            while (left := deadline - monotonic()) > 0:
                readable, writable, _ = select.select([call], [call], [], left)
                if readable:
                    call.settimeout(_left(deadline))
                    [rate] = receive(call, PING_NUMBER_STRUCT)
                    return float(rate)
                if writable:
                    with suppress(BlockingIOError):
                        call.send(block)
    except (OSError, EOFError):
        pass
    return None


def _connected(peer: RankFacts, wanted: bytes, seconds: float, deadline: float) -> socket.socket:
    """A connection to this rank, and to no other process at its address."""
    call = socket.create_connection((peer.address, peer.port), timeout=_left(deadline))
    try:
        call.settimeout(_left(deadline))
        call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        call.sendall(PING_HELLO_STRUCT.pack(peer.token.encode(), wanted, seconds))
        try:
            if receive(call, PING_RANK_STRUCT) != (peer.rank,):
                raise EOFError
        except EOFError:
            raise OSError(WRONG_PEER_TEXT) from None
        except TimeoutError:
            raise OSError("connected, but nobody answers") from None
    except BaseException:
        call.close()
        raise
    return call


def _left(deadline: float) -> float:
    """The seconds to the deadline, never 0: such a socket wouldn't block at all."""
    return max(deadline - monotonic(), 0.001)


def reason(error: Exception) -> str:
    """The reason why a ping failed, in words that lead to a remedy."""
    if isinstance(error, OSError) and error.errno in NO_ROUTE_ERRNOS:
        return "no route"
    known = [text for kind, text in ERROR_TEXTS.items() if isinstance(error, kind)]
    return known[0] if known else str(getattr(error, "strerror", None) or error)


class PingServer(ThreadingTCPServer):
    """The server at any port of this address, from the beginning to the end of a `with`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(self, rank: int, address: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _Call)
        self.rank = rank
        self.clock = time
        self.token = token_hex(16)
        self.port: int = self.socket.getsockname()[1]

    def __enter__(self) -> Self:
        Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
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
            for _ in range(PING_RTT_COUNT):
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

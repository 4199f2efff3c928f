"""Pings and flows from one rank to another: reachability, round trip, clock offset and rate.

Of the round trips the shortest counts, as in NTP (RFC 5905, section 10): other work on the hosts
only adds to it. The peer's time, less the middle of that round trip by this host's, is how far its
clock is ahead, with an error of at most half of the round trip.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, perf_counter, time

from thalweg.doctor.finding import RankFacts
from thalweg.doctor.ping_server import (
    FLOW_CHUNK_BYTES,
    FLOW_REQUEST,
    PING_HELLO_STRUCT,
    PING_NUMBER_STRUCT,
    PING_RANK_STRUCT,
    PINGS_REQUEST,
    Clock,
    receive,
)

PING_OK = "ok"
SILENT_PEER_TEXT = "connected, but nobody answers"
WRONG_PEER_TEXT = "somebody else has that address here"
NOT_ERRNO = -1  # of errors that aren't the system's
MIN_SOCKET_TIMEOUT_SECONDS = 0.001
FIRST_PING_TIMEOUT_SECONDS, SECOND_PING_TIMEOUT_SECONDS = 3.0, 5.0
PING_RTT_COUNT = 8
MAX_CONCURRENT_PINGS = 16
MAX_PINGED_PEERS = 256
MAX_UNSENT_BYTES = 1 << 18  # in the sender's own buffer
ERRNO_TEXTS = {
    **dict.fromkeys((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EINVAL), "no route"),
    **dict.fromkeys((errno.ENETDOWN, errno.EHOSTDOWN), "no route"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "forbidden here"),
}


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


def ping_all(caller: int, peers: Sequence[RankFacts], clock: Clock = time) -> list[PingResult]:
    """Ping all peers, and those that fail a second time: hosts may be busy."""

    with ThreadPoolExecutor(MAX_CONCURRENT_PINGS) as pool:

        def ping_each(peers: Sequence[RankFacts], timeout: float) -> list[PingResult]:
            return list(pool.map(lambda peer: ping(caller, peer, timeout, clock), peers))

        first = ping_each(peers, FIRST_PING_TIMEOUT_SECONDS)
        failed = {result.peer for result in first if result.outcome != PING_OK}
        again = [peer for peer in peers if peer.rank in failed]
        second = {r.peer: r for r in ping_each(again, SECOND_PING_TIMEOUT_SECONDS)}
    return [second.get(result.peer, result) for result in first]


def max_ping_seconds(number: int) -> float:
    """The longest duration of `ping_all` with this number of peers, in seconds."""
    turns = -(-number // MAX_CONCURRENT_PINGS)
    return turns * 2 * (FIRST_PING_TIMEOUT_SECONDS + SECOND_PING_TIMEOUT_SECONDS)


def ping(caller: int, peer: RankFacts, patience: float, clock: Clock = time) -> PingResult:
    deadline = monotonic() + patience
    found = []
    try:
        with _connected(peer, PINGS_REQUEST, 0.0, deadline) as call:
            for _ in range(PING_RTT_COUNT):
                call.settimeout(_left(deadline))
                sent, start = clock(), perf_counter()
                call.sendall(b".")
                [theirs] = receive(call, PING_NUMBER_STRUCT)
                seconds = perf_counter() - start
                found.append((seconds, theirs - (sent + seconds / 2)))
    except (OSError, EOFError) as error:
        return PingResult(caller, peer.rank, reason(error))
    return PingResult(caller, peer.rank, PING_OK, *min(found))


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
            answered = receive(call, PING_RANK_STRUCT) == (peer.rank,)
        except EOFError:
            answered = False
        except TimeoutError:
            raise OSError(NOT_ERRNO, SILENT_PEER_TEXT) from None
        if not answered:
            raise OSError(NOT_ERRNO, WRONG_PEER_TEXT)
    except BaseException:
        call.close()
        raise
    return call


def _left(deadline: float) -> float:
    """The seconds to the deadline, never 0: such a socket wouldn't block at all."""
    return max(deadline - monotonic(), MIN_SOCKET_TIMEOUT_SECONDS)


def reason(error: Exception) -> str:
    """The reason why a ping failed, in words that lead to a remedy."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, EOFError | ConnectionResetError):
        return "connected, and then broken off"
    if isinstance(error, TimeoutError):
        return "timed out"
    known = ERRNO_TEXTS.get(getattr(error, "errno", NOT_ERRNO))
    return known or str(getattr(error, "strerror", None) or error)

"""One rank calls another: does it get through, how long is the way, how do the clocks differ, and
how fast is a flow?

Of the round trips the shortest counts, as in NTP (RFC 5905, section 10): whatever else happens only
adds to it. The other's time, less the middle of that round trip by this host's, is how far its
clock is ahead, give or take half of the round trip.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic, perf_counter, time
from typing import Any

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
SILENT_PEER_TEXT, WRONG_PEER_TEXT = (
    "connected, but nobody answers",
    "somebody else has that address here",
)
NOT_ERRNO = -1  # of what isn't the system's
MIN_SOCKET_TIMEOUT_SECONDS = 0.001  # seconds
FIRST_PING_TIMEOUT_SECONDS, SECOND_PING_TIMEOUT_SECONDS = (
    3.0,
    5.0,
)  # seconds for a call, and for the one after it
PING_RTT_COUNT = 8
MAX_CONCURRENT_PINGS = 16
MAX_PINGED_PEERS = 256  # that a rank calls
MAX_UNSENT_BYTES = 1 << 18  # bytes that wait in the sender's own buffer
NO_ROUTE_ERRNOS = (
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EINVAL,
    errno.ENETDOWN,
    errno.EHOSTDOWN,
)
FORBIDDEN_ERRNOS = (errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class PingResult:
    """`outcome` is OK, or why it failed; `ahead` seconds is the other's clock."""

    caller: int
    peer: int
    outcome: str
    trip: float = 0.0  # seconds
    ahead: float = 0.0

    def packed(self) -> dict[str, Any]:
        return asdict(self)


def peers_of(rank: int, ranks: Sequence[int]) -> list[int]:
    """Whom it calls: all others, or the next ones in the circle if they are very many."""
    place = list(ranks).index(rank)
    return [*ranks[place + 1 :], *ranks[:place]][:MAX_PINGED_PEERS]


def ping_all(caller: int, peers: Sequence[RankFacts], clock: Clock = time) -> list[PingResult]:
    """Who can't be reached is called a second time, with fewer at once: hosts may be busy."""

    def called(peer: RankFacts, patience: float) -> PingResult:
        return ping(caller, peer, patience, clock)

    with ThreadPoolExecutor(MAX_CONCURRENT_PINGS) as pool:
        pings = list(pool.map(lambda peer: called(peer, FIRST_PING_TIMEOUT_SECONDS), peers))
        known = {peer.rank: peer for peer in peers}
        again = [known[call.peer] for call in pings if call.outcome != PING_OK]
        second = {
            c.peer: c
            for c in pool.map(lambda peer: called(peer, SECOND_PING_TIMEOUT_SECONDS), again)
        }
    return [second.get(call.peer, call) for call in pings]


def max_ping_seconds(number: int) -> float:
    """Seconds until `call_all` is over, whatever happens."""
    turns = -(-number // MAX_CONCURRENT_PINGS)
    return turns * 2 * (FIRST_PING_TIMEOUT_SECONDS + SECOND_PING_TIMEOUT_SECONDS)


def ping(caller: int, peer: RankFacts, patience: float, clock: Clock = time) -> PingResult:
    deadline = monotonic() + patience
    try:
        with _connected(peer, PINGS_REQUEST, 0.0, deadline) as call:
            shortest = ahead = float("inf")
            for _ in range(PING_RTT_COUNT):
                call.settimeout(_left(deadline))
                sent, start = clock(), perf_counter()
                call.sendall(b".")
                (theirs,) = PING_NUMBER_STRUCT.unpack(receive(call, PING_NUMBER_STRUCT.size))
                trip = perf_counter() - start
                if trip < shortest:
                    shortest, ahead = trip, theirs - (sent + trip / 2)
    except (OSError, EOFError) as error:
        return PingResult(caller=caller, peer=peer.rank, outcome=reason(error))
    return PingResult(caller=caller, peer=peer.rank, outcome=PING_OK, trip=shortest, ahead=ahead)


def send_flow(peer: RankFacts, seconds: float, patience: float) -> float | None:
    """Bits per second that arrive there; None if it doesn't tell."""
    block = os.urandom(FLOW_CHUNK_BYTES)  # what a compressing tunnel can't shrink
    deadline = monotonic() + seconds + patience
    try:
        with _connected(peer, FLOW_REQUEST, seconds, deadline) as call:
            call.setblocking(False)
            with suppress(AttributeError):  # Linux has it: keep little in this host's own queue
                call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
            while (left := deadline - monotonic()) > 0:
                readable, writable, _ = select.select([call], [call], [], left)
                if readable:
                    call.settimeout(_left(deadline))
                    return float(
                        PING_NUMBER_STRUCT.unpack(receive(call, PING_NUMBER_STRUCT.size))[0]
                    )
                if writable:
                    with suppress(BlockingIOError):
                        call.send(block)
    except (OSError, EOFError):
        pass
    return None


def _connected(peer: RankFacts, wanted: bytes, seconds: float, deadline: float) -> socket.socket:
    """To that rank and nobody else."""
    call = socket.create_connection((peer.address, peer.port), timeout=_left(deadline))
    try:
        call.settimeout(_left(deadline))
        call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        call.sendall(PING_HELLO_STRUCT.pack(peer.token.encode(), wanted, seconds))
        try:
            answered = PING_RANK_STRUCT.unpack(receive(call, PING_RANK_STRUCT.size))[0] == peer.rank
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
    """Seconds, and never none: a socket without time would not block at all."""
    return max(deadline - monotonic(), MIN_SOCKET_TIMEOUT_SECONDS)


def reason(error: Exception) -> str:
    """Why a call failed, in words that lead to a remedy."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, EOFError | ConnectionResetError):
        return "connected, and then broken off"
    if isinstance(error, TimeoutError):
        return "timed out"
    number = getattr(error, "errno", None)
    if number in NO_ROUTE_ERRNOS:
        return "no route"
    if number in FORBIDDEN_ERRNOS:
        return "forbidden here"
    return str(getattr(error, "strerror", None) or error)

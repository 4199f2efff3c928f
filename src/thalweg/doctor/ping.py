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

from thalweg.doctor.finding import Facts
from thalweg.doctor.ping_server import BLOCK, FLOW, HELLO, NUMBER, PINGS, WHO, Clock, receive

OK = "ok"
SILENT, STRANGER = "connected, but nobody answers", "somebody else has that address here"
NOT_ERRNO = -1  # of what isn't the system's
LEAST = 0.001  # seconds
FIRST_PATIENCE, SECOND_PATIENCE = 3.0, 5.0  # seconds for a call, and for the one after it
TRIPS = 8
AT_ONCE = 16
MOST_PEERS = 256  # that a rank calls
UNSENT = 1 << 18  # bytes that wait in the sender's own buffer
NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EINVAL, errno.ENETDOWN, errno.EHOSTDOWN)
FORBIDDEN = (errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
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
    return [*ranks[place + 1 :], *ranks[:place]][:MOST_PEERS]


def call_all(caller: int, peers: Sequence[Facts], clock: Clock = time) -> list[Call]:
    """Who can't be reached is called a second time, with fewer at once: hosts may be busy."""

    def called(peer: Facts, patience: float) -> Call:
        return ping(caller, peer, patience, clock)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        calls = list(pool.map(lambda peer: called(peer, FIRST_PATIENCE), peers))
        known = {peer.rank: peer for peer in peers}
        again = [known[call.peer] for call in calls if call.outcome != OK]
        second = {c.peer: c for c in pool.map(lambda peer: called(peer, SECOND_PATIENCE), again)}
    return [second.get(call.peer, call) for call in calls]


def longest_calls(number: int) -> float:
    """Seconds until `call_all` is over, whatever happens."""
    turns = -(-number // AT_ONCE)
    return turns * 2 * (FIRST_PATIENCE + SECOND_PATIENCE)


def ping(caller: int, peer: Facts, patience: float, clock: Clock = time) -> Call:
    deadline = monotonic() + patience
    try:
        with _connected(peer, PINGS, 0.0, deadline) as call:
            shortest = ahead = float("inf")
            for _ in range(TRIPS):
                call.settimeout(_left(deadline))
                sent, start = clock(), perf_counter()
                call.sendall(b".")
                (theirs,) = NUMBER.unpack(receive(call, NUMBER.size))
                trip = perf_counter() - start
                if trip < shortest:
                    shortest, ahead = trip, theirs - (sent + trip / 2)
    except (OSError, EOFError) as error:
        return Call(caller=caller, peer=peer.rank, outcome=reason(error))
    return Call(caller=caller, peer=peer.rank, outcome=OK, trip=shortest, ahead=ahead)


def send_flow(peer: Facts, seconds: float, patience: float) -> float | None:
    """Bits per second that arrive there; None if it doesn't tell."""
    block = os.urandom(BLOCK)  # what a compressing tunnel can't shrink
    deadline = monotonic() + seconds + patience
    try:
        with _connected(peer, FLOW, seconds, deadline) as call:
            call.setblocking(False)
            with suppress(AttributeError):  # Linux has it: keep little in this host's own queue
                call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
            while (left := deadline - monotonic()) > 0:
                readable, writable, _ = select.select([call], [call], [], left)
                if readable:
                    call.settimeout(_left(deadline))
                    return float(NUMBER.unpack(receive(call, NUMBER.size))[0])
                if writable:
                    with suppress(BlockingIOError):
                        call.send(block)
    except (OSError, EOFError):
        pass
    return None


def _connected(peer: Facts, wanted: bytes, seconds: float, deadline: float) -> socket.socket:
    """To that rank and nobody else."""
    call = socket.create_connection((peer.address, peer.port), timeout=_left(deadline))
    try:
        call.settimeout(_left(deadline))
        call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        call.sendall(HELLO.pack(peer.token.encode(), wanted, seconds))
        try:
            answered = WHO.unpack(receive(call, WHO.size))[0] == peer.rank
        except EOFError:
            answered = False
        except TimeoutError:
            raise OSError(NOT_ERRNO, SILENT) from None
        if not answered:
            raise OSError(NOT_ERRNO, STRANGER)
    except BaseException:
        call.close()
        raise
    return call


def _left(deadline: float) -> float:
    """Seconds, and never none: a socket without time would not block at all."""
    return max(deadline - monotonic(), LEAST)


def reason(error: Exception) -> str:
    """Why a call failed, in words that lead to a remedy."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, EOFError | ConnectionResetError):
        return "connected, and then broken off"
    if isinstance(error, TimeoutError):
        return "timed out"
    number = getattr(error, "errno", None)
    if number in NO_ROUTE:
        return "no route"
    if number in FORBIDDEN:
        return "forbidden here"
    return str(getattr(error, "strerror", None) or error)

"""What the kernel knows of this process's TCP connections, whoever opened them.

Linux tells for every connection how many bytes were acknowledged, and for how long it was busy:
something was under way or waited to be, of which it keeps apart the time in which the receiver had
no room (`tcp_info`, since Linux 4.9). So the rate of a link is known without sending anything, also
under torch's own collectives, and a receiver that is late isn't taken for a slow link.

Elsewhere nothing is told, and nothing is known.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

DESCRIPTORS = Path("/proc/self/fd")
OPTION = getattr(socket, "TCP_INFO", None)
NBYTES = 232  # of struct tcp_info that are asked for
NEEDED = 192  # with which it has all that is read here
RTT = struct.Struct("=68xI")
ACKED = struct.Struct("=120xQ")
BUSY = struct.Struct("=168xQQ")  # and what of it the receiver had no room
REFRESH = 1.0  # seconds between two looks for new connections
MICROSECONDS = 1e-6
SHORTEST_RTT = 1e-6


class Sent(NamedTuple):
    """Over a connection, since it was last looked at. `busy` is without the time in which the peer
    had no room."""

    address: str  # the peer's
    port: int
    nbytes: int
    busy: float  # seconds
    round_trip: float  # seconds, as the kernel smooths it


class Connections:
    """Of this process, to other hosts: `own` are addresses of this one."""

    def __init__(self, own: frozenset[str]) -> None:
        self._own = own
        self._known: dict[tuple[int, str, int], tuple[int, int]] = {}  # bytes, and busy
        self._looked = -REFRESH
        self._descriptors: list[int] = []

    def sent(self) -> list[Sent]:
        """What moved since the last time."""
        if OPTION is None:
            return []
        now = monotonic()
        if now - self._looked >= REFRESH:
            self._looked = now
            self._descriptors = list(_sockets())
        found, known = [], {}
        for descriptor in self._descriptors:
            told = _told(descriptor)
            if told is None or told[0][0] in self._own:
                continue
            (address, port), acked, busy, round_trip = told
            key = descriptor, address, port
            known[key] = acked, busy
            before = self._known.get(key)
            if before is not None and acked > before[0]:
                seconds = max(0, busy - before[1]) * MICROSECONDS
                found.append(Sent(address, port, acked - before[0], seconds, round_trip))
        self._known = known
        return found


def _sockets() -> Iterator[int]:
    """Descriptors of this process that are sockets."""
    if not DESCRIPTORS.is_dir():
        return
    for path in list(DESCRIPTORS.iterdir()):
        with suppress(OSError):  # closed meanwhile
            if path.readlink().name.startswith("socket:"):
                yield int(path.name)


def _told(descriptor: int) -> tuple[tuple[str, int], int, int, float] | None:
    """The peer, bytes acknowledged, microseconds busy, and a round trip; None if it isn't a TCP
    connection. The descriptor is another's: it is borrowed and left open."""
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if borrowed.type != socket.SOCK_STREAM or borrowed.family not in _FAMILIES:
            return None
        peer = borrowed.getpeername()
        assert OPTION is not None
        info = borrowed.getsockopt(socket.IPPROTO_TCP, OPTION, NBYTES)
    except OSError:
        return None
    finally:
        borrowed.detach()
    if len(info) < NEEDED:
        return None
    [acked] = ACKED.unpack_from(info)
    busy, no_room = BUSY.unpack_from(info)
    [round_trip] = RTT.unpack_from(info)
    return (plain(peer[0]), peer[1]), acked, busy - no_room, round_trip * MICROSECONDS


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def plain(address: str) -> str:
    """The IPv4 address in an IPv6 one that stands for it, and no zone."""
    return address.removeprefix("::ffff:").partition("%")[0]

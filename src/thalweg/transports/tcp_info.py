"""What the kernel knows of this process's TCP connections, whoever opened them.

Linux tells for every connection how many bytes were acknowledged, and for how long it was busy:
something was under way or waited to be, of which it keeps apart the time in which the receiver had
no room (`tcp_info`, since Linux 4.9; its clock ticks every few milliseconds). So the rate of a link
is known without sending anything, also under torch's own collectives, and a receiver that is late
isn't taken for a slow link.

Elsewhere nothing is told, and nothing is known.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import monotonic
from typing import NamedTuple

DESCRIPTORS_PATH = Path("/proc/self/fd")
TCP_INFO_OPTION = getattr(socket, "TCP_INFO", None)
TCP_INFO_BYTES = 232  # of struct tcp_info that are asked for
MIN_TCP_INFO_BYTES = 192  # with which it has all that is read here
UNANSWERED_STRUCT = struct.Struct("=2xBB")  # segments in a row, and questions for room
MAX_UNANSWERED_COUNT = 4  # after 0.2, 0.4, 0.8 and 1.6 seconds on a quick link
RTT_STRUCT = struct.Struct("=68xI")
ACKED_STRUCT = struct.Struct("=120xQ")
BUSY_STRUCT = struct.Struct("=168xQQ")  # and what of it the receiver had no room
MICROSECOND_SECONDS = 1e-6
MIN_OBSERVED_TRAFFIC_BYTES, TRAFFIC_MEMORY_SECONDS = (
    1 << 16,
    300.0,
)  # bytes between two looks at all, and seconds
_Key = tuple[int, str, int]
"""A descriptor, and the address and port that it leads to."""
_Counts = tuple[int, int, float]
"""Bytes that were acknowledged, microseconds busy, and the seconds of a round trip."""


class ConnectionTraffic(NamedTuple):
    """Over a connection, since it was last looked at. `busy` is without the time in which the peer
    had no room."""

    address: str  # the peer's
    port: int
    nbytes: int
    busy: float  # seconds
    round_trip: float  # seconds, as the kernel smooths it


def answers(connection: socket.socket) -> bool:
    """Whether the other end's kernel still acknowledges what is sent, be it that it has no room."""
    if TCP_INFO_OPTION is None:
        return True
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO_OPTION, TCP_INFO_BYTES)
    except OSError:  # it isn't told here
        return True
    segments, questions = UNANSWERED_STRUCT.unpack_from(info)
    return bool(max(segments, questions) < MAX_UNANSWERED_COUNT)


class Connections:
    """Of this process, to other hosts: `own` are addresses of this one. One thread looks at all of
    them from time to time, another at those that much went over, whenever it likes."""

    def __init__(self, own: frozenset[str]) -> None:
        self._own = own
        self._all: dict[_Key, _Counts] = {}
        self._busy: dict[_Key, _Counts] = {}
        self._used: dict[_Key, float] = {}  # when much went over a connection last
        self._descriptors: list[int] = []  # of those

    def look_at_all(self) -> list[ConnectionTraffic]:
        """What moved since the last time; and which connections are worth a look until the next."""
        told = self._counters(_open())
        found = _moved(self._all, told)
        now = monotonic()
        self._used |= {
            key: now for key, sent in found.items() if sent.nbytes >= MIN_OBSERVED_TRAFFIC_BYTES
        }
        self._used = {
            k: t for k, t in self._used.items() if k in told and now - t < TRAFFIC_MEMORY_SECONDS
        }
        self._descriptors = [descriptor for descriptor, _, _ in self._used]
        self._all = told
        return list(found.values())

    def sent(self) -> list[ConnectionTraffic]:
        """What moved since the last time on those that much goes over."""
        told = self._counters(self._descriptors)
        found = _moved(self._busy, told)
        self._busy = told
        return list(found.values())

    def _counters(self, descriptors: Iterable[int]) -> dict[_Key, _Counts]:
        told = (_socket_counters(descriptor) for descriptor in descriptors)
        return {key: counts for key, counts in filter(None, told) if key[1] not in self._own}


def _moved(
    before: Mapping[_Key, _Counts], now: Mapping[_Key, _Counts]
) -> dict[_Key, ConnectionTraffic]:
    found = {}
    for key, (acked, busy, round_trip) in now.items():
        acked_before, busy_before, _ = before.get(key, (acked, busy, 0.0))
        if acked > acked_before:
            seconds = max(0, busy - busy_before) * MICROSECOND_SECONDS
            found[key] = ConnectionTraffic(
                key[1], key[2], acked - acked_before, seconds, round_trip
            )
    return found


def _open() -> list[int]:
    """Descriptors of this process, of whatever kind."""
    try:
        with os.scandir(DESCRIPTORS_PATH) as entries:
            return [int(entry.name) for entry in entries]
    except OSError:  # no /proc
        return []


def _socket_counters(descriptor: int) -> tuple[_Key, _Counts] | None:
    """None if it isn't a TCP connection. The descriptor is another's: it is borrowed and left
    open."""
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if borrowed.type != socket.SOCK_STREAM or borrowed.family not in _FAMILIES:
            return None
        peer = borrowed.getpeername()
        assert TCP_INFO_OPTION is not None
        info = borrowed.getsockopt(socket.IPPROTO_TCP, TCP_INFO_OPTION, TCP_INFO_BYTES)
    except OSError:
        return None
    finally:
        borrowed.detach()
    if len(info) < MIN_TCP_INFO_BYTES:
        return None
    [acked] = ACKED_STRUCT.unpack_from(info)
    busy, no_room = BUSY_STRUCT.unpack_from(info)
    [round_trip] = RTT_STRUCT.unpack_from(info)
    key = descriptor, plain(peer[0]), peer[1]
    return key, (acked, busy - no_room, round_trip * MICROSECOND_SECONDS)


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def plain(address: str) -> str:
    """The IPv4 address in an IPv6 one that stands for it, and no zone."""
    return address.removeprefix("::ffff:").partition("%")[0]

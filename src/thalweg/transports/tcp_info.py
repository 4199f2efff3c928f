"""The kernel's counters of this process's TCP connections, whichever library opened them.

Linux counts the acknowledged bytes of every connection, and the time for which it was busy, that
is, had data in flight or waiting, with the part of it in which the receive window was full
(`tcp_info`, since Linux 4.9; its clock ticks every few milliseconds). So the rate of a link is
known without sending anything, also under torch's own collectives, and a receiver that is a
straggler isn't taken for a slow link.

Other systems have no such counters, and nothing is measured.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import monotonic
from typing import NamedTuple

DESCRIPTORS_PATH = Path("/proc/self/fd")
IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)
TCP_INFO_OPTION = getattr(socket, "TCP_INFO", None)
TCP_INFO_BYTES = 232  # requested bytes of struct tcp_info
UNANSWERED_STRUCT = struct.Struct("=2xBB")  # retransmits, and window probes
MAX_UNANSWERED_COUNT = 4  # after 0.2, 0.4, 0.8 and 1.6 seconds on a fast link
# The round-trip time, acknowledged bytes, time busy, and its part with a full receive window
TRAFFIC_STRUCT = struct.Struct("=68xI48xQ40xQQ")
MICROSECOND_SECONDS = 1e-6
MIN_OBSERVED_TRAFFIC_BYTES = 1 << 16  # between two readings of all connections
TRAFFIC_MEMORY_SECONDS = 300.0
_Key = tuple[int, str, int]
"""A descriptor, and the address and port of its peer."""
_Counts = tuple[int, int, float]
"""Acknowledged bytes, microseconds busy, and the round-trip time in seconds."""


class ConnectionTraffic(NamedTuple):
    """The traffic of a connection since its last reading. `busy` excludes the time with a full
    receive window."""

    address: str  # the peer's
    port: int
    nbytes: int
    busy: float  # seconds
    round_trip: float  # seconds, as the kernel smooths it


def answers(connection: socket.socket) -> bool:
    """True if the peer's kernel still acknowledges data or window probes."""
    if TCP_INFO_OPTION is None:
        return True
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO_OPTION, TCP_INFO_BYTES)
    except OSError:  # not on this system
        return True
    retransmits, probes = UNANSWERED_STRUCT.unpack_from(info)
    return bool(max(retransmits, probes) < MAX_UNANSWERED_COUNT)


class Connections:
    """The connections of this process to other hosts; `own` are this host's addresses. One thread
    reads all of them from time to time, another the busy ones at any time."""

    def __init__(self, own: frozenset[str]) -> None:
        self._own = own
        self._all: dict[_Key, _Counts] = {}
        self._busy: dict[_Key, _Counts] = {}
        self._used: dict[_Key, float] = {}  # when a connection was busy last
        self._descriptors: list[int] = []  # of the busy ones

    def look_at_all(self) -> list[ConnectionTraffic]:
        """The traffic since the last call; also selects the busy connections until the next."""
        counters = self._counters(_open())
        traffic = _moved(self._all, counters)
        now = monotonic()
        self._used |= {
            key: now for key, sent in traffic.items() if sent.nbytes >= MIN_OBSERVED_TRAFFIC_BYTES
        }
        self._used = {
            key: last
            for key, last in self._used.items()
            if key in counters and now - last < TRAFFIC_MEMORY_SECONDS
        }
        self._descriptors = [descriptor for descriptor, _, _ in self._used]
        self._all = counters
        return list(traffic.values())

    def sent(self) -> list[ConnectionTraffic]:
        """The traffic of the busy connections since the last call."""
        counters = self._counters(self._descriptors)
        traffic = _moved(self._busy, counters)
        self._busy = counters
        return list(traffic.values())

    def _counters(self, descriptors: Iterable[int]) -> dict[_Key, _Counts]:
        counters = (_socket_counters(descriptor) for descriptor in descriptors)
        return {key: counts for key, counts in filter(None, counters) if key[1] not in self._own}


def _moved(
    before: Mapping[_Key, _Counts], now: Mapping[_Key, _Counts]
) -> dict[_Key, ConnectionTraffic]:
    traffic = {}
    for key, (acked, busy, round_trip) in now.items():
        acked_before, busy_before, _ = before.get(key, (acked, busy, 0.0))
        if acked > acked_before:
            seconds = max(0, busy - busy_before) * MICROSECOND_SECONDS
            traffic[key] = ConnectionTraffic(
                key[1], key[2], acked - acked_before, seconds, round_trip
            )
    return traffic


def _open() -> list[int]:
    """The open descriptors of this process, of whatever kind."""
    try:
        return [int(entry.name) for entry in DESCRIPTORS_PATH.iterdir()]
    except OSError:  # no /proc
        return []


def _socket_counters(descriptor: int) -> tuple[_Key, _Counts] | None:
    """The counters of a TCP connection; None for other descriptors. The descriptor belongs to its
    opener: it is borrowed and left open."""
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if borrowed.type != socket.SOCK_STREAM or borrowed.family not in IP_FAMILIES:
            return None
        peer = borrowed.getpeername()
        assert TCP_INFO_OPTION is not None
        info = borrowed.getsockopt(socket.IPPROTO_TCP, TCP_INFO_OPTION, TCP_INFO_BYTES)
    except OSError:
        return None
    finally:
        borrowed.detach()
    if len(info) < TRAFFIC_STRUCT.size:
        return None
    round_trip, acked, busy, window_full = TRAFFIC_STRUCT.unpack_from(info)
    key = descriptor, plain(peer[0]), peer[1]
    return key, (acked, busy - window_full, round_trip * MICROSECOND_SECONDS)


def plain(address: str) -> str:
    """An address without its zone; an IPv4-mapped IPv6 address as IPv4."""
    return address.removeprefix("::ffff:").partition("%")[0]

"""TCP streams and datagrams between hosts of a lab, all driven by this process.

A socket stays in the namespace that it was made in, so no workers are needed to measure a link.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Self

from thalweg.lab import Lab
from thalweg.lab.namespaces import inside

AT_ONCE = 1 << 17  # bytes
PATIENCE = 10.0  # seconds


class Stream:
    """One TCP connection, from the host of a rank to that of another."""

    def __init__(self, lab: Lab, source: int, target: int) -> None:
        wiring = lab.wiring
        with inside(wiring.host_of(target)):
            listener = socket.create_server((wiring.hosts[lab.cluster.host(target).name], 0))
        with listener:
            with inside(wiring.host_of(source)):
                self.sender = socket.create_connection(listener.getsockname(), PATIENCE)
            listener.settimeout(PATIENCE)
            self.receiver, _ = listener.accept()
        self.received = 0
        for end in (self.sender, self.receiver):
            end.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.sender.close()
        self.receiver.close()


def pump(streams: Sequence[Stream], until: Callable[[], bool]) -> None:
    """Send as fast as TCP takes it, until something is so."""
    senders = [stream.sender for stream in streams]
    receivers = {stream.receiver: stream for stream in streams}
    data, room = bytes(AT_ONCE), bytearray(AT_ONCE)
    while not until():
        readable, writable, _ = select.select(list(receivers), senders, [], 0.05)
        for ready in readable:
            with suppress(BlockingIOError):
                receivers[ready].received += ready.recv_into(room)
        for ready in writable:
            with suppress(BlockingIOError):
                ready.send(data)


def rates(streams: Sequence[Stream], *, skip: float, seconds: float) -> list[float]:
    """Bits per second that arrive, over so many seconds after the first few."""
    start = monotonic() + skip
    pump(streams, lambda: monotonic() >= start)
    before = [stream.received for stream in streams]
    began = monotonic()
    pump(streams, lambda: monotonic() >= began + seconds)
    took = monotonic() - began
    return [8 * (stream.received - had) / took for stream, had in zip(streams, before, strict=True)]


def rate(stream: Stream, *, skip: float = 0.4, seconds: float = 0.8) -> float:
    return rates([stream], skip=skip, seconds=seconds)[0]


class Post:
    """Datagrams between the hosts of two ranks."""

    def __init__(self, lab: Lab, one: int, other: int) -> None:
        self.ends = {}
        for rank in (one, other):
            with inside(lab.wiring.host_of(rank)):
                self.ends[rank] = socket.socket(type=socket.SOCK_DGRAM)
                self.ends[rank].bind((lab.wiring.hosts[lab.cluster.host(rank).name], 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for end in self.ends.values():
            end.close()

    def arrives(self, source: int, target: int, seconds: float = 0.3) -> bool:
        """Whether one of three messages does, which takes microseconds on a whole link."""
        for _ in range(3):
            self.ends[source].sendto(b"message", self.ends[target].getsockname())
        self.ends[target].settimeout(seconds)
        try:
            self.ends[target].recv(100)
        except TimeoutError:
            return False
        self.ends[target].setblocking(False)
        with suppress(BlockingIOError):
            while self.ends[target].recv(100):
                pass
        return True

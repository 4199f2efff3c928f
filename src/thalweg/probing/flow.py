"""One flow from one host to another, and how fast it is.

The sender keeps the network busy, but no more: what it has sent and the receiver hasn't confirmed
stays below a window, which is what was confirmed during the last `span` seconds, and half a
megabyte at least. So no queue on the way overflows, flows that meet share fairly, and when the
sender stops little is left under way.

The rate is the receiver's: bytes that arrived after a beginning that doesn't count (links let the
first 128 KB or so pass without holding them back, and TCP starts slowly) over the time that they
took. It counts payload, as training does: of an Ethernet's rate that is 95.6 % (1,448 bytes of each
packet of 1,514).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic

import numpy as np

from thalweg.probing.exchange import BYTES, CONFIRMATIONS, Exchange
from thalweg.transports import Array, Sending

LEAST_WINDOW, LARGEST_WINDOW = 1 << 19, 1 << 26  # bytes
LEAST_MESSAGE, LARGEST_MESSAGE = 1 << 16, 1 << 22
IN_A_WINDOW = 8  # messages
LEAST_MESSAGES = 12  # on links so slow that the time isn't enough
BEGINNING = 0.3  # of the time
BEGINNING_NBYTES = 1 << 18
LAST = 1  # byte: nothing follows


class _Window:
    """What is under way, and how much of it may be."""

    def __init__(self, exchange: Exchange, peer: int, span: float) -> None:
        self._exchange = exchange
        self._peer = peer
        self._span = span
        self._under_way: deque[tuple[int, Sending]] = deque()
        self._confirmed: deque[tuple[float, int]] = deque()
        self._recent = 0
        self.outstanding = 0

    @property
    def nbytes(self) -> int:
        return max(LEAST_WINDOW, min(self._recent, LARGEST_WINDOW))

    def send(self, array: Array) -> None:
        self._under_way.append((array.nbytes, self._exchange.send(self._peer, BYTES, array)))
        self.outstanding += array.nbytes

    def take_confirmation(self) -> None:
        self._exchange.receive(self._peer, CONFIRMATIONS)
        nbytes, sending = self._under_way.popleft()
        sending.wait(monotonic() + self._exchange.patience)
        self.outstanding -= nbytes
        self._recent += nbytes
        now = monotonic()
        self._confirmed.append((now, nbytes))
        while self._confirmed[0][0] < now - self._span:
            self._recent -= self._confirmed.popleft()[1]


def send_flow(exchange: Exchange, peer: int, seconds: float, span: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, LARGEST_MESSAGE, np.uint8)
    window = _Window(exchange, peer, span)
    sent = 0
    end = monotonic() + seconds
    while monotonic() < end or sent < LEAST_MESSAGES:
        if window.outstanding >= window.nbytes:
            window.take_confirmation()
        else:
            nbytes = min(window.nbytes // IN_A_WINDOW, LARGEST_MESSAGE)
            window.send(noise[: max(nbytes, LEAST_MESSAGE)])
            sent += 1
    while window.outstanding:
        window.take_confirmation()
    exchange.send(peer, BYTES, noise[:LAST]).wait(monotonic() + exchange.patience)


def receive_flow(exchange: Exchange, peer: int, seconds: float) -> float:
    """Bits per second."""
    start = monotonic()
    nothing: Array = np.zeros(1, np.uint8)
    arrivals: list[tuple[float, int]] = []
    while True:
        nbytes = exchange.receive(peer, BYTES, seconds).nbytes
        if nbytes == LAST:
            return rate_of(arrivals, seconds)
        arrivals.append((monotonic() - start, nbytes))
        exchange.send(peer, CONFIRMATIONS, nothing).wait(monotonic() + exchange.patience)


def rate_of(arrivals: Sequence[tuple[float, int]], seconds: float) -> float:
    """Bits per second of these moments and bytes: from the first that is behind the beginning to
    the last within the time, or on slow links to the last of all."""
    marks: list[tuple[float, int]] = []
    total = 0
    for when, nbytes in arrivals:
        total += nbytes
        behind = total >= BEGINNING_NBYTES and when >= BEGINNING * seconds
        if behind and (when <= seconds or len(marks) < 2):
            marks.append((when, total))
    if len(marks) < 2:
        marks = [arrivals[0], (arrivals[-1][0], total)]
    (first, before), (last, after) = marks[0], marks[-1]
    return 8 * (after - before) / max(last - first, 1e-9)

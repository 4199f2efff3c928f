"""One flow from one host to another, and how fast it is.

The sender keeps the link busy, but no more. The receiver confirms every message with the moment of
its arrival, so the sender knows how much longer than the fastest one it was under way: so long it
waited in queues on the way there (the two clocks may differ, but their difference doesn't change).
What is under way and not confirmed stays below a window, which grows while that delay is below a
target and shrinks above it, as in LEDBAT (RFC 6817). So queues stay short, flows that meet share
fairly, those that go the opposite way aren't held up, and when the sender stops little is left
under way.

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

from thalweg.probing.messages import BYTES, CONFIRMATIONS, Exchange
from thalweg.transports import Array, Sending

TARGET = 0.025  # seconds in queues
GAIN = 0.5  # share of what was confirmed that the window grows by, at most
FIRST_WINDOW, LARGEST_WINDOW = 1 << 17, 1 << 26  # bytes
LEAST_MESSAGE, LARGEST_MESSAGE = 1 << 15, 1 << 22
IN_A_WINDOW, LEAST_IN_A_WINDOW = 8, 2  # messages
LEAST_MESSAGES = 16  # on links so slow that the time isn't enough
BEGINNING = 0.3  # of the time
LATEST_BEGINNING = 0.6
MOMENTS = 7  # at each end
BEGINNING_NBYTES = 1 << 18
LAST = 1  # byte: nothing follows


class _Window:
    """What is under way, and how much of it may be."""

    def __init__(self, exchange: Exchange, peer: int) -> None:
        self._exchange = exchange
        self._peer = peer
        self._under_way: deque[tuple[int, float, Sending]] = deque()
        self._fastest = float("inf")
        self._limit = float(FIRST_WINDOW)
        self._outstanding = 0

    @property
    def full(self) -> bool:
        return self._outstanding >= self._limit

    @property
    def empty(self) -> bool:
        return not self._under_way

    @property
    def message(self) -> int:
        """Bytes of the next one."""
        return max(LEAST_MESSAGE, min(int(self._limit) // IN_A_WINDOW, LARGEST_MESSAGE))

    def send(self, array: Array) -> None:
        sending = self._exchange.send(self._peer, BYTES, array)
        self._under_way.append((array.nbytes, monotonic(), sending))
        self._outstanding += array.nbytes

    def take_confirmation(self) -> None:
        [arrived] = self._exchange.receive(self._peer, CONFIRMATIONS).view(np.float64)
        nbytes, sent, sending = self._under_way.popleft()
        sending.wait(monotonic() + self._exchange.patience)
        self._outstanding -= nbytes
        took = float(arrived) - sent
        self._fastest = min(self._fastest, took)
        off_target = max(-1.0, GAIN * (1.0 - (took - self._fastest) / TARGET))
        least = LEAST_IN_A_WINDOW * LEAST_MESSAGE
        self._limit = min(max(least, self._limit + nbytes * off_target), LARGEST_WINDOW)


def send_flow(exchange: Exchange, peer: int, seconds: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, LARGEST_MESSAGE, np.uint8)
    window = _Window(exchange, peer)
    sent = 0
    end = monotonic() + seconds
    while monotonic() < end or sent < LEAST_MESSAGES:
        if window.full:
            window.take_confirmation()
        else:
            window.send(noise[: window.message])
            sent += 1
    while not window.empty:
        window.take_confirmation()
    exchange.send(peer, BYTES, noise[:LAST]).wait(monotonic() + exchange.patience)


def receive_flow(exchange: Exchange, peer: int, seconds: float) -> float:
    """Bits per second."""
    start = monotonic()
    arrivals: list[tuple[float, int]] = []
    while True:
        nbytes = exchange.receive(peer, BYTES, seconds).nbytes
        if nbytes == LAST:
            return rate_of(arrivals, seconds)
        now = monotonic()
        arrivals.append((now - start, nbytes))
        exchange.send(peer, CONFIRMATIONS, np.array([now])).wait(now + exchange.patience)


def rate_of(arrivals: Sequence[tuple[float, int]], seconds: float) -> float:
    """Bits per second of these moments and bytes, from the end of the beginning to the end of the
    time, or on slow links to the last arrival: the median over several first and last moments,
    since a host that stalls for a moment then takes in at once what has piled up."""
    when = np.array([moment for moment, _ in arrivals])
    total = np.cumsum([nbytes for _, nbytes in arrivals])
    burst = when[min(int(total.searchsorted(BEGINNING_NBYTES)), len(when) - 1)]
    begin = max(BEGINNING * seconds, float(burst))
    end = seconds if begin < LATEST_BEGINNING * seconds else float(when[-1])
    if begin >= end:
        begin = float(when[0])
    third = (end - begin) / 3
    first = np.linspace(begin, begin + third, MOMENTS)
    last = np.linspace(end - third, end, MOMENTS)
    at_first, at_last = np.interp(first, when, total), np.interp(last, when, total)
    slopes = np.subtract.outer(at_last, at_first) / np.subtract.outer(last, first).clip(1e-9)
    return float(8 * np.median(slopes))

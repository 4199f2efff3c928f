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

from thalweg.probing.messages import BYTES_LABEL, CONFIRMATIONS_LABEL, ProbeMessenger
from thalweg.transports import Array, Sending

TARGET_QUEUE_SECONDS = 0.025  # seconds in queues
WINDOW_GAIN_FRACTION = 0.5  # share of what was confirmed that the window grows by, at most
FIRST_WINDOW_BYTES, MAX_WINDOW_BYTES = 1 << 17, 1 << 26  # bytes
MIN_FLOW_MESSAGE_BYTES, MAX_FLOW_MESSAGE_BYTES = 1 << 15, 1 << 22
MESSAGES_PER_WINDOW_COUNT, MIN_MESSAGES_PER_WINDOW = 8, 2  # messages
MIN_FLOW_MESSAGE_COUNT = 16  # on links so slow that the time isn't enough
FLOW_RAMP_UP_FRACTION = 0.3  # of the time
MAX_FLOW_RAMP_UP_FRACTION = 0.6
RATE_SAMPLE_COUNT = 7  # at each end
FLOW_BURST_BYTES = 1 << 18
LAST_FLOW_MESSAGE_BYTES = 1  # byte: nothing follows


class _SendWindow:
    """What is under way, and how much of it may be."""

    def __init__(self, exchange: ProbeMessenger, peer: int) -> None:
        self._exchange = exchange
        self._peer = peer
        self._under_way: deque[tuple[int, float, Sending]] = deque()
        self._fastest = float("inf")
        self._limit = float(FIRST_WINDOW_BYTES)
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
        return max(
            MIN_FLOW_MESSAGE_BYTES,
            min(int(self._limit) // MESSAGES_PER_WINDOW_COUNT, MAX_FLOW_MESSAGE_BYTES),
        )

    def send(self, array: Array) -> None:
        sending = self._exchange.send(self._peer, BYTES_LABEL, array)
        self._under_way.append((array.nbytes, monotonic(), sending))
        self._outstanding += array.nbytes

    def receive_confirmation(self) -> None:
        [arrived] = self._exchange.receive(self._peer, CONFIRMATIONS_LABEL).view(np.float64)
        nbytes, sent, sending = self._under_way.popleft()
        sending.wait(monotonic() + self._exchange.patience)
        self._outstanding -= nbytes
        took = float(arrived) - sent
        self._fastest = min(self._fastest, took)
        off_target = max(
            -1.0, WINDOW_GAIN_FRACTION * (1.0 - (took - self._fastest) / TARGET_QUEUE_SECONDS)
        )
        least = MIN_MESSAGES_PER_WINDOW * MIN_FLOW_MESSAGE_BYTES
        self._limit = min(max(least, self._limit + nbytes * off_target), MAX_WINDOW_BYTES)


def send_flow(exchange: ProbeMessenger, peer: int, seconds: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, MAX_FLOW_MESSAGE_BYTES, np.uint8)
    window = _SendWindow(exchange, peer)
    sent = 0
    end = monotonic() + seconds
    while monotonic() < end or sent < MIN_FLOW_MESSAGE_COUNT:
        if window.full:
            window.receive_confirmation()
        else:
            window.send(noise[: window.message])
            sent += 1
    while not window.empty:
        window.receive_confirmation()
    exchange.send(peer, BYTES_LABEL, noise[:LAST_FLOW_MESSAGE_BYTES]).wait(
        monotonic() + exchange.patience
    )


def receive_flow(exchange: ProbeMessenger, peer: int, seconds: float) -> float:
    """Bits per second."""
    start = monotonic()
    arrivals: list[tuple[float, int]] = []
    while True:
        nbytes = exchange.receive(peer, BYTES_LABEL, seconds).nbytes
        if nbytes == LAST_FLOW_MESSAGE_BYTES:
            return rate_of(arrivals, seconds)
        now = monotonic()
        arrivals.append((now - start, nbytes))
        exchange.send(peer, CONFIRMATIONS_LABEL, np.array([now])).wait(now + exchange.patience)


def rate_of(arrivals: Sequence[tuple[float, int]], seconds: float) -> float:
    """Bits per second of these moments and bytes, from the end of the beginning to the end of the
    time, or on slow links to the last arrival: the median over several first and last moments,
    since a host that stalls for a moment then takes in at once what has piled up."""
    when = np.array([moment for moment, _ in arrivals])
    total = np.cumsum([nbytes for _, nbytes in arrivals])
    burst = when[min(int(total.searchsorted(FLOW_BURST_BYTES)), len(when) - 1)]
    begin = max(FLOW_RAMP_UP_FRACTION * seconds, float(burst))
    end = seconds if begin < MAX_FLOW_RAMP_UP_FRACTION * seconds else float(when[-1])
    if begin >= end:
        begin = float(when[0])
    third = (end - begin) / 3
    first = np.linspace(begin, begin + third, RATE_SAMPLE_COUNT)
    last = np.linspace(end - third, end, RATE_SAMPLE_COUNT)
    at_first, at_last = np.interp(first, when, total), np.interp(last, when, total)
    slopes = np.subtract.outer(at_last, at_first) / np.subtract.outer(last, first).clip(1e-9)
    return float(8 * np.median(slopes))

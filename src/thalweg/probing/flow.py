"""The messages of a probe, and flows from one host to another: how fast is a flow?

The sender keeps the link busy, but no more. The receiver confirms every message with the time of
its arrival, so the sender knows how much longer than the fastest message it took: that is its
queueing delay (the two clocks may differ, but their difference doesn't change). The bytes in flight
stay below a window, which grows while that delay is below a target and shrinks above it, as in
LEDBAT (RFC 6817). So queues stay short, flows that share a link share it fairly, flows in the
opposite direction aren't delayed, and little is in flight when the sender stops.

The receiver computes the rate: the bytes that arrived after the ramp-up (links let the first 128 KB
or so pass unshaped, and TCP starts slowly) over the time that they took. It counts payload, as
training does: of an Ethernet's rate that is 95.6 % (1,448 bytes of each packet of 1,514).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

import numpy as np

from thalweg.errors import FIRST_ROUND_BETWEEN_STEPS, PeerLate
from thalweg.members.abort import AbortFlag
from thalweg.transports import Address, Array, Label, Sending, Transport

ORDERS_LABEL, ANSWERS_LABEL, PINGS_LABEL, PONGS_LABEL, BYTES_LABEL, CONFIRMATIONS_LABEL = (
    Label(0, FIRST_ROUND_BETWEEN_STEPS + number, 0, 0) for number in range(6)
)
PROBE_ABORT_POLL_SECONDS = 0.5
TARGET_QUEUE_SECONDS = 0.025  # queueing delay that the window aims at
WINDOW_GAIN_FRACTION = 0.5  # of the confirmed bytes, by which the window grows at most
FIRST_WINDOW_BYTES, MAX_WINDOW_BYTES = 1 << 17, 1 << 26
MIN_FLOW_MESSAGE_BYTES, MAX_FLOW_MESSAGE_BYTES = 1 << 15, 1 << 22
MESSAGES_PER_WINDOW_COUNT, MIN_MESSAGES_PER_WINDOW = 8, 2
MIN_FLOW_MESSAGE_COUNT = 16  # on links so slow that the time isn't enough
FLOW_RAMP_UP_FRACTION = 0.3  # of the flow's duration
MAX_FLOW_RAMP_UP_FRACTION = 0.6
RATE_SAMPLE_COUNT = 7  # at each end
FLOW_BURST_BYTES = 1 << 18
LAST_FLOW_MESSAGE_BYTES = 1  # size of the message that ends a flow


class ProbeMessenger:
    """Messages over the transport that training will use, which watch the abort flag.

    A rank that waits polls the flag: it learns that another rank has failed, and answers roll
    calls, so nobody takes it for a dead rank. `patience` is the time in seconds that anything may
    take beyond its expected duration."""

    def __init__(self, transport: Transport, abort_flag: AbortFlag, patience: float) -> None:
        self.patience = patience
        self._transport = transport
        self._abort_flag = abort_flag

    def send(self, peer: int, label: Label, array: Array) -> Sending:
        return self._transport.send(peer, label, array, monotonic() + self.patience)

    def receive(self, peer: int, label: Label, seconds: float = 0.0) -> Array:
        """Wait for a message for `seconds` and the patience, or until another rank aborts."""
        deadline = monotonic() + seconds + self.patience
        while True:
            until = monotonic() + PROBE_ABORT_POLL_SECONDS
            try:
                wanted = [Address(peer, label)]
                return self._transport.receive_any(wanted, min(until, deadline))[1]
            except PeerLate:
                abort = self._abort_flag.poll()
                if abort is not None:
                    raise abort from None
                if monotonic() >= deadline:
                    raise

    def send_json(self, peer: int, label: Label, content: Any) -> None:
        text = np.frombuffer(json.dumps(content).encode(), np.uint8)
        self.send(peer, label, text).wait(monotonic() + self.patience)

    def receive_json(self, peer: int, label: Label, seconds: float = 0.0) -> Any:
        return json.loads(self.receive(peer, label, seconds).tobytes())


class _SendWindow:
    """The messages in flight, and the limit of their bytes."""

    def __init__(self, messenger: ProbeMessenger, peer: int) -> None:
        self.in_flight: deque[tuple[int, float, Sending]] = deque()
        self.limit = float(FIRST_WINDOW_BYTES)
        self.outstanding = 0
        self._messenger = messenger
        self._peer = peer
        self._fastest = float("inf")

    def send(self, array: Array) -> None:
        sending = self._messenger.send(self._peer, BYTES_LABEL, array)
        self.in_flight.append((array.nbytes, monotonic(), sending))
        self.outstanding += array.nbytes

    def receive_confirmation(self) -> None:
        [arrived] = self._messenger.receive(self._peer, CONFIRMATIONS_LABEL).view(np.float64)
        nbytes, sent, sending = self.in_flight.popleft()
        sending.wait(monotonic() + self._messenger.patience)
        self.outstanding -= nbytes
        seconds = float(arrived) - sent
        self._fastest = min(self._fastest, seconds)
        queued = (seconds - self._fastest) / TARGET_QUEUE_SECONDS
        off_target = max(-1.0, WINDOW_GAIN_FRACTION * (1.0 - queued))
        least = MIN_MESSAGES_PER_WINDOW * MIN_FLOW_MESSAGE_BYTES
        self.limit = min(max(least, self.limit + nbytes * off_target), MAX_WINDOW_BYTES)


def send_flow(messenger: ProbeMessenger, peer: int, seconds: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, MAX_FLOW_MESSAGE_BYTES, np.uint8)
    window = _SendWindow(messenger, peer)
    sent = 0
    end = monotonic() + seconds
    while monotonic() < end or sent < MIN_FLOW_MESSAGE_COUNT:
        if window.outstanding >= window.limit:
            window.receive_confirmation()
        else:
            wanted = int(window.limit) // MESSAGES_PER_WINDOW_COUNT
            window.send(noise[: max(MIN_FLOW_MESSAGE_BYTES, wanted)])  # at most all of it
            sent += 1
    while window.in_flight:
        window.receive_confirmation()
    last = messenger.send(peer, BYTES_LABEL, noise[:LAST_FLOW_MESSAGE_BYTES])
    last.wait(monotonic() + messenger.patience)


def receive_flow(messenger: ProbeMessenger, peer: int, seconds: float) -> float:
    """Receive a flow and return its rate in bits per second."""
    start = monotonic()
    arrivals: list[tuple[float, int]] = []
    while True:
        nbytes = messenger.receive(peer, BYTES_LABEL, seconds).nbytes
        if nbytes == LAST_FLOW_MESSAGE_BYTES:
            return rate_of(arrivals, seconds)
        now = monotonic()
        arrivals.append((now - start, nbytes))
        messenger.send(peer, CONFIRMATIONS_LABEL, np.array([now])).wait(now + messenger.patience)


def rate_of(arrivals: Sequence[tuple[float, int]], seconds: float) -> float:
    """The rate in bits per second of these arrivals (time and bytes) of a flow of `seconds`.

    It is taken from the end of the ramp-up to the end of the flow, on slow links to the last
    arrival: the median over several first and last times, since a host that stalls for a moment
    then receives at once what has piled up."""
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

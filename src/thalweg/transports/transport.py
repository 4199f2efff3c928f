"""Bytes between ranks: what every transport can do.

A message is an array under a label: the round it belongs to, and its span of chunks. Messages with
the same sender, receiver and label arrive in the order in which they were sent; others in any.
Deadlines are moments of `time.monotonic()`; nothing waits without one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

Array = NDArray[Any]


class Label(NamedTuple):
    round: int
    start: int
    stop: int


class Address(NamedTuple):
    """From whom, and under which label."""

    peer: int
    label: Label


class Transport(Protocol):
    @property
    def rank(self) -> int: ...

    def send(self, peer: int, label: Label, array: Array) -> None:
        """Hand the array over; it may be changed as soon as this returns. Doesn't wait."""

    def receive(self, peer: int, label: Label, deadline: float) -> Array:
        """The next message under this label; PeerLate if it isn't there by the deadline."""

    def receive_any(self, wanted: Collection[Address], deadline: float) -> tuple[Address, Array]:
        """The first of these messages to arrive; PeerLate if none is there by the deadline."""

    def close(self) -> None:
        """Give up what is on its way. Waiting calls raise TransportClosed."""

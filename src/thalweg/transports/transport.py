"""Messages between ranks: the interface of every transport.

A message is an array under a label: the step and round it belongs to, and its span of chunks.
Messages with the same sender, receiver and label arrive in the order in which they were sent;
others in any. A received array has the bytes that were sent; the receiver knows their type.
Deadlines are times of `time.monotonic()`; no call waits without one.

A transport is in a membership epoch: the ranks that exchange messages now, under a number. At first
it is in epoch 0, with all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from thalweg.transports.store_client import Store

Array = NDArray[Any]


class Label(NamedTuple):
    step: int
    round: int  # in this step
    start: int
    stop: int


class Address(NamedTuple):
    """The sender and the label of a message."""

    peer: int
    label: Label


Add = Callable[[int, memoryview], None]
"""Receives the offset in bytes of a piece of a payload, and the piece."""


class Landing(NamedTuple):
    """The target of an awaited payload while it arrives: these bytes, or, piece by piece, `add`.
    The message is delivered with this very array."""

    array: Array
    add: Add | None = None


Landings = Callable[[Address, int], Landing | None]
"""The landing of a message, by its address and length; None: it is delivered in new memory."""


class Sending(Protocol):
    """A submitted message, which may still be read from its array."""

    @property
    def done(self) -> bool:
        """True if the array may be changed."""

    def wait(self, deadline: float) -> None:
        """Wait until the array may be changed; PeerLate if that takes longer than the deadline."""


class Transport(Protocol):
    @property
    def rank(self) -> int: ...

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        """Submit the array, which must not change until the sending is waited for. Waits only while
        the queue to this peer is full."""

    def receive_any(
        self, wanted: Collection[Address], deadline: float, landings: Landings | None = None
    ) -> tuple[Address, Array]:
        """The first of these messages to arrive, the oldest of its label; PeerLate if none arrives
        by the deadline. Until the next call or the next epoch, `landings` are the targets of
        payloads."""

    def enter_epoch(self, epoch: int, members: Collection[int]) -> None:
        """Send and receive as one of these members from now on. Messages of an older epoch are
        dropped and never delivered; those of members that entered this one first are. Called by the
        thread that sends and receives."""

    def idle(self, seconds: float) -> None:
        """Receive in the background while no message is awaited, until one arrives or `wake` is
        called: messages of early peers cross the links before they are needed."""

    def wake(self) -> None:
        """End the `idle` of the thread that sends and receives; any thread may call this."""

    def check_sends(self) -> None:
        """Raise PeerLost if sent messages may be lost, where that is a reason for a rendezvous; for
        a rank that waits for no message."""

    def use_store(self, store: Store) -> None:
        """Look peers up in this store from now on, since the old one is lost."""

    def close(self) -> None:
        """Drop incoming messages. Waiting calls raise TransportClosed."""


class _CompletedSend:
    done = True

    def wait(self, deadline: float) -> None:
        """Return at once: the array was copied."""


SENT: Sending = _CompletedSend()

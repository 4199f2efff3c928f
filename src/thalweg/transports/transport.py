"""Bytes between ranks: what every transport can do.

A message is an array under a label: the step and round it belongs to, and its span of chunks.
Messages with the same sender, receiver and label arrive in the order in which they were sent;
others in any. What arrives has the bytes that were sent; the receiver knows their type.
Deadlines are moments of `time.monotonic()`; nothing waits without one.

A transport is in a formation: the ranks that exchange messages now, under a number. One that was
told of none is in formation 0, with everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from thalweg.transports.store_client import Store

Array = NDArray[Any]


class Label(NamedTuple):
    step: int
    round: int  # in this step
    start: int
    stop: int


class Address(NamedTuple):
    """From whom, and under which label."""

    peer: int
    label: Label


Add = Callable[[int, memoryview], None]
"""Takes a piece of a payload, and at which of its bytes the piece begins."""


class Landing(NamedTuple):
    """Where the payload of an awaited message goes while it arrives: into these bytes, or, piece by
    piece, to `add`. The message is handed out with this very array."""

    array: Array
    add: Add | None = None


Landings = Callable[[Address, int], Landing | None]
"""The landing of a message, by its address and length; None: it is handed out in new memory."""


class Sending(Protocol):
    """A message that was handed over and may still be read from its array."""

    @property
    def done(self) -> bool:
        """Whether the array may be changed."""

    def wait(self, deadline: float) -> None:
        """Until the array may be changed; PeerLate if that takes longer than the deadline."""


class Transport(Protocol):
    @property
    def rank(self) -> int: ...

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        """Hand the array over, which is left alone until the sending is waited for. Waits only
        while the queue to this peer is full."""

    def receive(self, peer: int, label: Label, deadline: float) -> Array:
        """The next message under this label; PeerLate if it isn't there by the deadline."""

    def receive_any(
        self, wanted: Collection[Address], deadline: float, landings: Landings | None = None
    ) -> tuple[Address, Array]:
        """The first of these messages to arrive; PeerLate if none is there by the deadline. Until
        the next call or the next formation, `landings` says where payloads may go."""

    def enter_epoch(self, formation: int, members: Collection[int]) -> None:
        """From now on send and receive as one of these members. What is under way of an older
        formation is given up and never handed out; what a member has sent already, because it
        entered first, is. Called by the thread that sends and receives."""

    def idle(self, seconds: float) -> None:
        """Take in what arrives, for one that waits for no message, until there is something, or
        `wake` is called: what early peers send crosses the links before it is needed."""

    def wake(self) -> None:
        """End the `idle` of the thread that sends and receives; called by any thread."""

    def check_sends(self) -> None:
        """For one that waits for nothing: PeerLost if what it has sent may not have arrived, where
        that is a reason for all to meet."""

    def use_store(self, store: Store) -> None:
        """Find one another by this store from now on: the old one is gone."""

    def close(self) -> None:
        """Give up what is on its way in. Waiting calls raise TransportClosed."""


def in_bytes(array: Array) -> Array:
    """Its bytes as a vector; a copy only if they don't lie in one piece or are read-only."""
    return np.require(array, requirements=("C", "W")).reshape(-1).view(np.uint8)


class _CompletedSend:
    done = True

    def wait(self, deadline: float) -> None:
        """It was copied."""


SENT: Sending = _CompletedSend()

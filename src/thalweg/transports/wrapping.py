"""Wrappers of a run's transport: a recorder of its messages, or faults for tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic

from thalweg.transports.transport import Address, Array, Label, Landings, Sending, Transport

MESSAGE_HISTORY_COUNT = 100_000
Wrapper = Callable[[Transport], Transport]
_wrapper: ContextVar[Wrapper | None] = ContextVar("transport wrapper", default=None)


@contextmanager
def wrapping_transports(wrapper: Wrapper) -> Iterator[None]:
    """Inside, `attach()` gives the run's messages to `wrapper(transport)`."""
    token = _wrapper.set(wrapper)
    try:
        yield
    finally:
        _wrapper.reset(token)


def wrapped(transport: Transport) -> Transport:
    wrapper = _wrapper.get()
    return transport if wrapper is None else wrapper(transport)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMessage:
    """A message that was sent or received, with its time by `time.monotonic`."""

    seconds: float
    sent: bool
    peer: int
    label: Label
    nbytes: int


class RecordedTransport:
    """A transport that records the messages of another one, which it wraps."""

    def __init__(self, inner: Transport, kept: int = MESSAGE_HISTORY_COUNT) -> None:
        self.messages: deque[RecordedMessage] = deque(maxlen=kept)
        self._inner = inner
        self.rank = inner.rank
        self.enter_epoch = inner.enter_epoch
        self.idle = inner.idle
        self.wake = inner.wake
        self.check_sends = inner.check_sends
        self.use_store = inner.use_store
        self.close = inner.close

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        self._record(True, peer, label, array)
        return self._inner.send(peer, label, array, deadline)

    def receive_any(
        self, wanted: Collection[Address], deadline: float, landings: Landings | None = None
    ) -> tuple[Address, Array]:
        address, array = self._inner.receive_any(wanted, deadline, landings)
        self._record(False, *address, array)
        return address, array

    def _record(self, sent: bool, peer: int, label: Label, array: Array) -> None:
        message = RecordedMessage(
            seconds=monotonic(), sent=sent, peer=peer, label=label, nbytes=array.nbytes
        )
        self.messages.append(message)

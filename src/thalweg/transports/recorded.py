"""What went over a transport, message by message: a wrapper over any other."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from time import monotonic

from thalweg.transports.store_client import Store
from thalweg.transports.transport import Address, Array, Label, Landings, Sending, Transport

KEPT = 100_000  # messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """When a message was handed over or taken in, by `time.monotonic`."""

    seconds: float
    sent: bool
    peer: int
    label: Label
    nbytes: int


class RecordedTransport:
    def __init__(self, inner: Transport, kept: int = KEPT) -> None:
        self.messages: deque[Message] = deque(maxlen=kept)
        self._inner = inner

    @property
    def rank(self) -> int:
        return self._inner.rank

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        self._note(True, peer, label, array)
        return self._inner.send(peer, label, array, deadline)

    def receive(self, peer: int, label: Label, deadline: float) -> Array:
        return self.receive_any((Address(peer, label),), deadline)[1]

    def receive_any(
        self, wanted: Collection[Address], deadline: float, landings: Landings | None = None
    ) -> tuple[Address, Array]:
        address, array = self._inner.receive_any(wanted, deadline, landings)
        self._note(False, *address, array)
        return address, array

    def enter(self, formation: int, members: Collection[int]) -> None:
        self._inner.enter(formation, members)

    def idle(self, seconds: float) -> None:
        self._inner.idle(seconds)

    def wake(self) -> None:
        self._inner.wake()

    def look_about(self) -> None:
        self._inner.look_about()

    def meet_at(self, store: Store) -> None:
        self._inner.meet_at(store)

    def close(self) -> None:
        self._inner.close()

    def _note(self, sent: bool, peer: int, label: Label, array: Array) -> None:
        self.messages.append(
            Message(seconds=monotonic(), sent=sent, peer=peer, label=label, nbytes=array.nbytes)
        )

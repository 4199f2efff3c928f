"""Ranks as threads of one process: schedules run for real, with real waiting, and no network."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from threading import Condition
from time import monotonic

from thalweg.errors import PeerLate, TransportClosed
from thalweg.transports.transport import Address, Array, Label


class MemoryNetwork:
    """The inboxes of all ranks; messages from the first to the second of a `cut` pair are lost."""

    def __init__(self, ranks: Collection[int], cut: Collection[tuple[int, int]] = ()) -> None:
        self.inboxes = {rank: _Inbox() for rank in ranks}
        self.cut = frozenset(cut)

    def transport(self, rank: int) -> MemoryTransport:
        return MemoryTransport(self, rank)


class MemoryTransport:
    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank
        self._inbox = network.inboxes[rank]

    @property
    def rank(self) -> int:
        return self._rank

    def send(self, peer: int, label: Label, array: Array) -> None:
        if self._inbox.closed:
            raise TransportClosed(f"rank {self._rank} sends after close()", "send before it")
        if (self._rank, peer) not in self._network.cut:
            self._network.inboxes[peer].put(Address(self._rank, label), array.copy())

    def receive(self, peer: int, label: Label, deadline: float) -> Array:
        return self.receive_any((Address(peer, label),), deadline)[1]

    def receive_any(self, wanted: Collection[Address], deadline: float) -> tuple[Address, Array]:
        found = self._inbox.take(wanted, deadline)
        if found is None:
            raise PeerLate(
                rank=self._rank,
                peers=tuple(sorted({address.peer for address in wanted})),
                round_number=min(address.label.round for address in wanted),
            )
        return found

    def close(self) -> None:
        self._inbox.close()


class _Inbox:
    def __init__(self) -> None:
        self.closed = False
        self._changed = Condition()
        self._messages: dict[Address, deque[Array]] = {}

    def put(self, address: Address, array: Array) -> None:
        with self._changed:
            if not self.closed:
                self._messages.setdefault(address, deque()).append(array)
                self._changed.notify_all()

    def take(self, wanted: Collection[Address], deadline: float) -> tuple[Address, Array] | None:
        with self._changed:
            while True:
                if self.closed:
                    raise TransportClosed("received after close()", "receive before it")
                address = next((a for a in self._messages if a in wanted), None)
                if address is not None:
                    queue = self._messages[address]
                    array = queue.popleft()
                    if not queue:
                        del self._messages[address]
                    return address, array
                left = deadline - monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._messages.clear()
            self._changed.notify_all()

"""What has arrived and nobody has asked for yet, by sender and label."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from threading import Condition
from time import monotonic

from thalweg.errors import PeerLate, ThalwegError, TransportClosed
from thalweg.transports.transport import Address, Array


class Inbox:
    """Filled by one or more threads, emptied by another."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.closed = False
        self._changed = Condition()
        self._messages: dict[Address, deque[Array]] = {}
        self._lost: dict[int, ThalwegError] = {}

    def refuse_if_closed(self, doing: str) -> None:
        if self.closed:
            raise TransportClosed(f"rank {self.rank} {doing} after close()", "do so before it")

    def put(self, address: Address, array: Array) -> None:
        with self._changed:
            if not self.closed:
                self._messages.setdefault(address, deque()).append(array)
                self._changed.notify_all()

    def lose(self, peer: int, error: ThalwegError) -> None:
        """Nothing more will come from this peer: who waits for it gets this error."""
        with self._changed:
            self._lost[peer] = error
            self._changed.notify_all()

    def take_now(self, wanted: Collection[Address]) -> tuple[Address, Array] | None:
        """One of these messages, if it is here."""
        with self._changed:
            return self._take(wanted)

    def take(self, wanted: Collection[Address], deadline: float) -> tuple[Address, Array]:
        with self._changed:
            while True:
                found = self._take(wanted)
                if found is not None:
                    return found
                left = deadline - monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise late(self.rank, wanted)

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._messages.clear()
            self._changed.notify_all()

    def _take(self, wanted: Collection[Address]) -> tuple[Address, Array] | None:
        self.refuse_if_closed("receives")
        address = next((a for a in self._messages if a in wanted), None)
        if address is not None:
            queue = self._messages[address]
            array = queue.popleft()
            if not queue:
                del self._messages[address]
            return address, array
        for peer, error in self._lost.items():
            if any(a.peer == peer for a in wanted):
                raise error
        return None


def late(rank: int, wanted: Collection[Address]) -> PeerLate:
    oldest = min(address.label[:2] for address in wanted)
    return PeerLate(
        rank=rank,
        peers=tuple(sorted({address.peer for address in wanted})),
        step=oldest[0],
        round_number=oldest[1],
    )

"""What has arrived and nobody has asked for yet, by sender and label.

Only messages of the present formation, from its members, are handed out. A peer may have entered
the next one before this rank: what it sends then is kept until this rank enters too, up to a bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from threading import Condition
from time import monotonic
from typing import NamedTuple

from thalweg.errors import PeerLate, TransportClosed, TransportError
from thalweg.transports.rejections import RejectionCounter, RejectionReason
from thalweg.transports.transport import Address, Array

MAX_EARLY_MESSAGES = 512  # messages of later formations that are kept
MAX_EARLY_BYTES = 256 << 20


class _EarlyMessage(NamedTuple):
    membership_epoch: int
    address: Address
    array: Array


class Inbox:
    """Filled by one or more threads, emptied by another."""

    def __init__(self, rank: int, refused: RejectionCounter | None = None) -> None:
        self.rank = rank
        self.closed = False
        self.membership_epoch = 0
        self.refused = RejectionCounter(rank) if refused is None else refused
        self._members: frozenset[int] | None = None  # None: everybody
        self._changed = Condition()
        self._woken = False
        self._messages: dict[Address, deque[Array]] = {}
        self._early: list[_EarlyMessage] = []

    def refuse_if_closed(self, doing: str) -> None:
        if self.closed:
            raise TransportClosed(f"rank {self.rank} {doing} after close()", "do so before it")

    def refuse_if_no_member(self, peer: int) -> None:
        if not self.has_member(peer):
            raise TransportError(
                f"rank {peer} isn't in formation {self.membership_epoch} of rank {self.rank}",
                "exchange messages with its members, or enter one that has it",
            )

    def has_member(self, peer: int) -> bool:
        return self._members is None or peer in self._members

    def enter_epoch(self, formation: int, members: Collection[int]) -> None:
        """Forget what came of older formations, and hand out what came early of this one."""
        with self._changed:
            self.refuse_if_closed(f"enters formation {formation}")
            if formation <= self.membership_epoch:
                raise TransportError(
                    f"rank {self.rank} can't enter formation {formation}: it is in "
                    f"{self.membership_epoch}",
                    "give each formation a higher number than the one before",
                )
            forgotten = sum(len(queue) for queue in self._messages.values())
            self.refused.count(RejectionReason.STALE, forgotten)
            self.membership_epoch = formation
            self._members = frozenset(members)
            self._messages.clear()
            early, self._early = self._early, []
            for message in early:
                self._sort_in(message)
            self._changed.notify_all()

    def put(self, address: Address, array: Array, formation: int = 0) -> None:
        with self._changed:
            if not self.closed:
                self._sort_in(_EarlyMessage(formation, address, array))
                self._changed.notify_all()

    def receive_now(self, wanted: Collection[Address]) -> tuple[Address, Array] | None:
        """One of these messages, if it is here."""
        with self._changed:
            return self._pop(wanted)

    def receive(self, wanted: Collection[Address], deadline: float) -> tuple[Address, Array]:
        with self._changed:
            while True:
                found = self._pop(wanted)
                if found is not None:
                    return found
                left = deadline - monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise peer_late_error(self.rank, wanted)

    def idle(self, seconds: float) -> None:
        """Wait until something has come, or `wake` was called."""
        with self._changed:
            if not self._woken:
                self._changed.wait(seconds)
            self._woken = False

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._messages.clear()
            self._early.clear()
            self._changed.notify_all()

    def _sort_in(self, message: _EarlyMessage) -> None:
        formation, address, array = message
        if formation > self.membership_epoch:
            if (
                len(self._early) < MAX_EARLY_MESSAGES
                and self._early_bytes() + array.nbytes <= MAX_EARLY_BYTES
            ):
                self._early.append(message)
            else:
                self.refused.count(RejectionReason.TOO_EARLY)
        elif formation < self.membership_epoch:
            self.refused.count(RejectionReason.STALE)
        elif not self.has_member(address.peer):
            self.refused.count(RejectionReason.OUTSIDER)
        else:
            self._messages.setdefault(address, deque()).append(array)

    def _early_bytes(self) -> int:
        return sum(message.array.nbytes for message in self._early)

    def _pop(self, wanted: Collection[Address]) -> tuple[Address, Array] | None:
        self.refuse_if_closed("receives")
        address = next((a for a in self._messages if a in wanted), None)
        if address is not None:
            queue = self._messages[address]
            array = queue.popleft()
            if not queue:
                del self._messages[address]
            return address, array
        for peer in {address.peer for address in wanted}:
            self.refuse_if_no_member(peer)
        return None


def peer_late_error(rank: int, wanted: Collection[Address]) -> PeerLate:
    oldest = min(address.label[:2] for address in wanted)
    return PeerLate(
        rank=rank,
        peers=tuple(sorted({address.peer for address in wanted})),
        step=oldest[0],
        round_number=oldest[1],
    )

"""Messages that have arrived and were not received yet, by sender and label.

Only messages of the current membership epoch, from its members, are delivered. A peer may enter the
next epoch before this rank: its messages are kept until this rank enters too, up to a bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container
from threading import Condition
from time import monotonic

from thalweg.errors import PeerLate, TransportClosed, TransportError
from thalweg.transports.rejections import RejectionCounter, RejectionReason
from thalweg.transports.transport import Address, Array, Landings

MAX_EARLY_MESSAGES = 512  # messages of later epochs that are kept
MAX_EARLY_BYTES = 256 << 20
EVERYBODY = range(1 << 31)


class Inbox:
    """A queue of messages that one or more threads fill and another one empties."""

    def __init__(self, rank: int, refused: RejectionCounter | None = None) -> None:
        self.rank = rank
        self.closed = False
        self.membership_epoch = 0
        self.refused = RejectionCounter(rank) if refused is None else refused
        self.members: Container[int] = EVERYBODY
        self._changed = Condition()
        self._woken = False
        self._messages: dict[Address, deque[Array]] = {}
        self._early: list[tuple[int, Address, Array]] = []  # with their epochs

    def refuse_if_closed(self, doing: str) -> None:
        if self.closed:
            raise TransportClosed(f"rank {self.rank} {doing} after close()", "do so before it")

    def refuse_if_no_member(self, peer: int) -> None:
        if peer not in self.members:
            raise TransportError(
                f"rank {peer} isn't in membership epoch {self.membership_epoch} of rank "
                f"{self.rank}",
                "exchange messages with members, or enter an epoch that has this rank",
            )

    def enter_epoch(self, epoch: int, members: Collection[int]) -> None:
        """Drop messages of older epochs, and deliver those of this one that came early."""
        with self._changed:
            self.refuse_if_closed(f"enters membership epoch {epoch}")
            if epoch <= self.membership_epoch:
                raise TransportError(
                    f"rank {self.rank} can't enter membership epoch {epoch}: it is in "
                    f"{self.membership_epoch}",
                    "give each epoch a higher number than the one before",
                )
            dropped = sum(len(queue) for queue in self._messages.values())
            self.refused.count(RejectionReason.STALE, dropped)
            self.membership_epoch = epoch
            self.members = frozenset(members)
            self._messages.clear()
            early, self._early = self._early, []
            for message in early:
                self._sort_in(*message)
            self._changed.notify_all()

    def put(self, address: Address, array: Array, epoch: int = 0) -> None:
        with self._changed:
            if not self.closed:
                self._sort_in(epoch, address, array)
                self._changed.notify_all()

    def receive_now(self, wanted: Collection[Address]) -> tuple[Address, Array] | None:
        """One of these messages if it has arrived, else None."""
        with self._changed:
            return self._pop(wanted)

    def receive_any(
        self, wanted: Collection[Address], deadline: float, landings: Landings | None = None
    ) -> tuple[Address, Array]:
        """One of these messages, for which this waits; arrays are delivered as they were put."""
        with self._changed:
            while True:
                received = self._pop(wanted)
                if received is not None:
                    return received
                left = deadline - monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise peer_late_error(self.rank, wanted)

    def idle(self, seconds: float) -> None:
        """Wait until a message has arrived, or `wake` was called."""
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

    def _sort_in(self, epoch: int, address: Address, array: Array) -> None:
        if epoch > self.membership_epoch:
            nbytes = array.nbytes + sum(early.nbytes for *_, early in self._early)
            if len(self._early) < MAX_EARLY_MESSAGES and nbytes <= MAX_EARLY_BYTES:
                self._early.append((epoch, address, array))
            else:
                self.refused.count(RejectionReason.TOO_EARLY)
        elif epoch < self.membership_epoch:
            self.refused.count(RejectionReason.STALE)
        elif address.peer not in self.members:
            self.refused.count(RejectionReason.OUTSIDER)
        else:
            self._messages.setdefault(address, deque()).append(array)

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

"""A transport between threads of one process: schedules really run and wait, without a network."""

from __future__ import annotations

from collections.abc import Collection

from thalweg.transports.inbox import Inbox
from thalweg.transports.store_client import Store
from thalweg.transports.transport import SENT, Address, Array, Label, Landings, Sending


class MemoryNetwork:
    """The inboxes of all ranks."""

    def __init__(self, ranks: Collection[int]) -> None:
        self.inboxes = {rank: Inbox(rank) for rank in ranks}

    def transport(self, rank: int) -> MemoryTransport:
        return MemoryTransport(self, rank)


class MemoryTransport:
    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self._network = network
        self.rank = rank
        self._inbox = network.inboxes[rank]

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        self._inbox.refuse_if_closed("sends")
        self._inbox.refuse_if_no_member(peer)
        address, epoch = Address(self.rank, label), self._inbox.membership_epoch
        self._network.inboxes[peer].put(address, array.copy(), epoch)
        return SENT

    def receive(self, peer: int, label: Label, deadline: float) -> Array:
        return self.receive_any((Address(peer, label),), deadline)[1]

    def receive_any(
        self, wanted: Collection[Address], deadline: float, landings: Landings | None = None
    ) -> tuple[Address, Array]:
        return self._inbox.receive(wanted, deadline)

    def enter_epoch(self, epoch: int, members: Collection[int]) -> None:
        self._inbox.enter_epoch(epoch, members)

    def idle(self, seconds: float) -> None:
        self._inbox.idle(seconds)

    def wake(self) -> None:
        self._inbox.wake()

    def check_sends(self) -> None:
        """Do nothing: no message is lost."""

    def use_store(self, store: Store) -> None:
        """Do nothing: peers need no addresses."""

    def close(self) -> None:
        self._inbox.close()

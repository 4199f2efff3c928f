"""A transport between threads of one process: schedules really run and wait, without a network."""

from __future__ import annotations

from collections.abc import Collection

from thalweg.transports.inbox import Inbox
from thalweg.transports.store_client import Store
from thalweg.transports.transport import SENT, Address, Array, Label, Sending


class MemoryNetwork:
    """The transports of all ranks, which put messages into one another."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._transports = {rank: MemoryTransport(self, rank) for rank in ranks}

    def transport(self, rank: int) -> MemoryTransport:
        return self._transports[rank]


class MemoryTransport(Inbox):
    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        super().__init__(rank)
        self._network = network

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        self.refuse_if_closed("sends")
        self.refuse_if_no_member(peer)
        address = Address(self.rank, label)
        self._network.transport(peer).put(address, array.copy(), self.membership_epoch)
        return SENT

    def check_sends(self) -> None:
        """Do nothing: no message is lost."""

    def use_store(self, store: Store) -> None:
        """Do nothing: peers need no addresses."""

"""The transport between processes: TCP, encrypted between hosts.

Large messages are sent from where they are, without a copy: their array is left alone until the
sending is waited for. Queues are bounded: where one is full, `send` waits. Whatever waits takes in
what arrives meanwhile, so that two ranks with full queues don't wait for each other.

Connections belong to a formation: entering the next one breaks them off, so what waits in them is
gone at once, and makes them anew where they are needed.

A connection that breaks comes back by itself, also to a peer that is back at another address; what
was on its way is lost. A peer that is gone for longer than a short grace is lost: who waits for it
or sends to it is told. Who waits for a peer that it never sent to connects to it, to see that.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from threading import Lock
from time import monotonic, sleep

import torch

from thalweg.errors import PeerLost
from thalweg.transports.connection import Outbound, Outgoing
from thalweg.transports.inbox import Inbox, peer_late_error
from thalweg.transports.rejections import RejectionReason
from thalweg.transports.security import SecurityConfig
from thalweg.transports.store_client import Store
from thalweg.transports.transport import (
    SENT,
    Address,
    Array,
    Label,
    Landing,
    Landings,
    Sending,
    in_bytes,
)
from thalweg.transports.wire import Wire

TCP_HEADER_STRUCT = struct.Struct(
    "<QQIIIQ"
)  # formation, step, round, start, stop, bytes of the payload
TCP_PURPOSE = "tcp"
MAX_QUEUED_MESSAGES = 256  # messages that may wait for one peer
MALLOC_THRESHOLD_BYTES = 31 << 20  # bytes, just below what glibc ever keeps for itself
SEND_CHECK_POLL_SECONDS = 0.1  # seconds of waiting after which connections are looked at
PEER_RECONNECT_SECONDS = 2.0  # seconds for a peer to come back


class TcpTransport:
    """`store` tells the ranks of one another's addresses; `host` is this one's. A peer whose
    connection is down for more than `grace` seconds is lost; unless this rank `forgives`, also one
    whose connection broke and is back. `look` is called while a message doesn't get away, and may
    raise."""

    def __init__(
        self,
        rank: int,
        store: Store,
        host: str = "127.0.0.1",
        *,
        security: SecurityConfig | None = None,
        grace: float = PEER_RECONNECT_SECONDS,
        forgives: bool = True,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank = rank
        self._forgives = forgives
        self._raise_if_aborted = look
        self._grace = grace
        self._wire = Wire(
            rank,
            store,
            host,
            purpose=TCP_PURPOSE,
            header_nbytes=TCP_HEADER_STRUCT.size,
            security=security,
        )
        self._inbox = Inbox(rank, self._wire.endpoint.refused)
        self._landings: Landings | None = None
        self._in_use = Lock()  # the wire belongs to one thread at a time
        _keep_freed_memory()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def refused(self) -> Mapping[RejectionReason, int]:
        """What came and wasn't handed out, and why."""
        return self._wire.endpoint.refused

    def use_store(self, store: Store) -> None:
        """Look peers up in this store from now on, and be found there; RunError if it doesn't
        answer."""
        self._wire.endpoint.use_store(store)

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        payload = in_bytes(array)
        with self._in_use:
            self._inbox.refuse_if_closed("sends")
            self._inbox.refuse_if_no_member(peer)
            header = TCP_HEADER_STRUCT.pack(self._inbox.membership_epoch, *label, payload.nbytes)
            outbound = self._connection(peer, label, deadline)
            if outbound.down:
                self._look_after(peer)
            while len(outbound.queue) >= MAX_QUEUED_MESSAGES:
                self._wait_for_room(outbound, label, deadline)
            message = self._wire.send(outbound, header, payload.data)
            return SENT if message.done else _Queued(self, outbound, message, label)

    def receive(self, peer: int, label: Label, deadline: float) -> Array:
        return self.receive_any((Address(peer, label),), deadline)[1]

    def receive_any(
        self, wanted: Collection[Address], deadline: float, landings: Landings | None = None
    ) -> tuple[Address, Array]:
        with self._in_use:
            self._landings = landings
            while True:
                found = self._inbox.receive_now(wanted)
                if found is not None:
                    return found
                left = deadline - monotonic()
                if left <= 0 and not self._take_in(0.0):
                    raise peer_late_error(self._rank, wanted)
                if left > 0 and not self._take_in(min(left, SEND_CHECK_POLL_SECONDS)):
                    for peer in {address.peer for address in wanted}:
                        self._look_after(peer)
                    self._look_for_losses()

    def wait_for(
        self, outbound: Outbound, message: Outgoing, label: Label, deadline: float
    ) -> None:
        """Until the message has left, or is lost."""
        while not message.done:
            if monotonic() >= deadline:
                raise peer_late_error(self._rank, (Address(outbound.peer_record.rank, label),))
            with self._in_use:
                self._inbox.refuse_if_closed("sends")
                outbound.awaited = True
                came = message.done or self._take_in(
                    min(SEND_CHECK_POLL_SECONDS, max(0.0, deadline - monotonic()))
                )
                if not came and self._inbox.has_member(outbound.peer_record.rank):
                    self._look_after(outbound.peer_record.rank)
            if not came:
                self._raise_if_aborted()

    def idle(self, seconds: float) -> None:
        with self._in_use:
            if not self._inbox.closed:
                self._take_in(seconds)

    def wake(self) -> None:
        self._wire.wake()

    def check_sends(self) -> None:
        with self._in_use:
            self._look_for_losses()

    def enter_epoch(self, formation: int, members: Collection[int]) -> None:
        with self._in_use:
            self._inbox.enter_epoch(formation, members)
            self._landings = None
            self._wire.hang_up()
            self._wire.detach_targets()

    def close(self) -> None:
        """Also lets what was sent last leave, for a moment."""
        if self._inbox.closed or self._wire.is_fork:
            return
        self._inbox.close()
        self._wire.wake()
        with self._in_use:
            self._wire.close(self._wire.outbound.values())

    def _connection(self, peer: int, label: Label, deadline: float) -> Outbound:
        outbound = self._wire.outbound.get(peer)
        if outbound is not None:
            return outbound
        while (record := self._wire.endpoint.find(peer)) is None:
            if monotonic() >= deadline:
                raise peer_late_error(self._rank, (Address(peer, label),))
            self._raise_if_aborted()
            sleep(SEND_CHECK_POLL_SECONDS / 10)
        return self._wire.connect(record)

    def _look_after(self, peer: int) -> None:
        """See whether the peer is there, and look for it if not; PeerLost if it was gone long."""
        outbound = self._wire.outbound.get(peer)
        if outbound is None:
            record = self._wire.endpoint.find(peer)
            if record is not None:
                self._wire.connect(record)
            return
        seconds = outbound.seconds_down()
        if not seconds:
            return
        record = self._wire.endpoint.find(peer)
        moved = record is not None and self._wire.endpoint.move(outbound, record)
        if seconds > self._grace and not moved:
            raise PeerLost(
                f"rank {self._rank} lost its connection to rank {peer} {seconds:.1f} s ago",
                f"look at what happened to rank {peer}",
                peer=peer,
            )

    def _look_for_losses(self) -> None:
        """Somebody may wait for ever for what was on its way when a connection broke."""
        for peer, outbound in self._wire.outbound.items():
            if outbound.has_broken and not self._forgives:
                raise PeerLost(
                    f"a connection of rank {self._rank} to rank {peer} broke",
                    f"look at what happened to rank {peer}",
                    peer=peer,
                )

    def _wait_for_room(self, outbound: Outbound, label: Label, deadline: float) -> None:
        self._inbox.refuse_if_closed("sends")
        peer = outbound.peer_record.rank
        left = deadline - monotonic()
        if left <= 0:
            raise peer_late_error(self._rank, (Address(peer, label),))
        outbound.awaited = True
        if not self._take_in(min(left, SEND_CHECK_POLL_SECONDS)):
            self._raise_if_aborted()
            self._look_after(peer)

    def _take_in(self, seconds: float) -> bool:
        """Move what has arrived into the inbox; whether anything happened."""
        messages = self._wire.receive(seconds, self._place)
        for rank, header, array in messages or ():
            formation, *label, _ = TCP_HEADER_STRUCT.unpack(header)
            self._inbox.put(Address(rank, Label(*label)), array, formation)
        return messages is not None

    def _place(self, rank: int, header: bytes, nbytes: int) -> Landing | None:
        formation, *label, _ = TCP_HEADER_STRUCT.unpack(header)
        if self._landings is None or formation != self._inbox.membership_epoch:
            return None
        return self._landings(Address(rank, Label(*label)), nbytes)


class _Queued:
    """A message that the socket did not take at once."""

    def __init__(
        self, transport: TcpTransport, outbound: Outbound, message: Outgoing, label: Label
    ) -> None:
        self._transport = transport
        self._outbound = outbound
        self._message = message
        self._label = label

    @property
    def done(self) -> bool:
        return self._message.done

    def wait(self, deadline: float) -> None:
        if not self._message.done:
            self._transport.wait_for(self._outbound, self._message, self._label, deadline)


def _keep_freed_memory() -> None:
    """Let the allocator keep what it frees, up to its own limit. Every message that comes in
    is allocated; glibc hands large blocks back to the kernel at once, and takes them again page
    by page, until it has seen a large one freed: let it see one."""
    torch.empty(MALLOC_THRESHOLD_BYTES, dtype=torch.uint8)

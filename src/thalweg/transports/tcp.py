"""The transport between processes: TCP, encrypted between hosts.

Large messages are sent from their array without a copy: it must not change until the sending is
waited for. Queues are bounded: where one is full, `send` waits. A waiting call receives meanwhile,
so that two ranks with full queues don't wait for each other.

Connections belong to a membership epoch: entering the next one closes them and drops their messages
at once; new ones are opened when they are needed.

A broken connection is opened again, also to a peer that restarted at another address; messages in
flight are lost. A peer that is gone for longer than a short grace is lost: calls that wait for it
or send to it raise PeerLost. A rank that waits for a peer without a connection opens one, to detect
this.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from threading import Lock
from time import monotonic, sleep

import numpy as np
import torch

from thalweg.errors import PeerLost
from thalweg.transports.connection import Outbound, Outgoing
from thalweg.transports.endpoint import Endpoint
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
)
from thalweg.transports.wire import Wire

TCP_HEADER_STRUCT = struct.Struct("<QQIIIQ")  # epoch, step, round, start, stop, payload bytes
TCP_PURPOSE = "tcp"
MAX_QUEUED_MESSAGES = 256  # per peer
MALLOC_THRESHOLD_BYTES = 31 << 20  # just below glibc's maximum
SEND_CHECK_POLL_SECONDS = 0.1  # between two checks of the connections while waiting
PEER_RECONNECT_SECONDS = 2.0


class TcpTransport:
    """A transport over TCP. `store` has the addresses of the ranks; `host` is this one's. A peer
    whose connection is down for more than `grace` seconds is lost; unless this rank `forgives`,
    also one whose connection broke and is up again. `look` is called while a message can't be sent,
    and may raise."""

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
        self.rank = rank
        self._forgives = forgives
        self._raise_if_aborted = look
        self._grace = grace
        endpoint = Endpoint(rank, store, host, purpose=TCP_PURPOSE, security=security)
        self._wire = Wire(endpoint, TCP_HEADER_STRUCT.size)
        self.refused: Mapping[RejectionReason, int] = endpoint.refused
        self.wake = self._wire.wake
        self.use_store = endpoint.use_store
        self._inbox = Inbox(rank, endpoint.refused)
        self._landings: Landings | None = None
        self._in_use = Lock()  # the wire belongs to one thread at a time
        # Every incoming message is allocated. glibc returns large blocks to the kernel at once, and
        # gets them back page by page, until it has seen a large one freed: free one, so that it
        # keeps freed memory, up to its own limit.
        torch.empty(MALLOC_THRESHOLD_BYTES, dtype=torch.uint8)

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        payload = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with self._in_use:
            outbound = self._wire.outbound.get(peer)  # of this epoch, until `close`
            if outbound is None:
                outbound = self._connect(peer, label, deadline)
            header = TCP_HEADER_STRUCT.pack(self._inbox.membership_epoch, *label, payload.nbytes)
            if outbound.down_since is not None:
                self._check_peer(peer)
            while len(outbound.queue) >= MAX_QUEUED_MESSAGES:
                self._wait_on(outbound, label, deadline)
            message = self._wire.send(outbound, header, payload.data)
            return SENT if message.done else _Queued(self, outbound, message, label)

    def receive_any(
        self, wanted: Collection[Address], deadline: float, landings: Landings | None = None
    ) -> tuple[Address, Array]:
        with self._in_use:
            self._landings = landings
            while True:
                received = self._inbox.receive_now(wanted)
                if received is not None:
                    return received
                left = deadline - monotonic()
                if left <= 0 and not self._receive(0.0):
                    raise peer_late_error(self.rank, wanted)
                if left > 0 and not self._receive(min(left, SEND_CHECK_POLL_SECONDS)):
                    for peer in {address.peer for address in wanted}:
                        self._check_peer(peer)
                    self._check_losses()

    def wait_for(
        self, outbound: Outbound, message: Outgoing, label: Label, deadline: float
    ) -> None:
        """Wait until the message was written, or is lost."""
        while not message.done:
            with self._in_use:
                self._wait_on(outbound, label, deadline, message)

    def idle(self, seconds: float) -> None:
        with self._in_use:
            if not self._inbox.closed:
                self._receive(seconds)

    def check_sends(self) -> None:
        with self._in_use:
            self._check_losses()

    def enter_epoch(self, epoch: int, members: Collection[int]) -> None:
        with self._in_use:
            self._inbox.enter_epoch(epoch, members)
            self._landings = None
            self._wire.hang_up()
            self._wire.detach_targets()

    def close(self) -> None:
        """Close the transport after a short time for the last messages to be written."""
        if self._inbox.closed or os.getpid() != self._wire.owner_pid:
            return
        self._inbox.close()
        self.wake()
        with self._in_use:
            self._wire.close(self._wire.outbound.values())

    def _connect(self, peer: int, label: Label, deadline: float) -> Outbound:
        self._inbox.refuse_if_closed("sends")
        self._inbox.refuse_if_no_member(peer)
        while (outbound := self._wire.reach(peer)) is None:
            if monotonic() >= deadline:
                raise peer_late_error(self.rank, (Address(peer, label),))
            self._raise_if_aborted()
            sleep(SEND_CHECK_POLL_SECONDS / 10)
        return outbound

    def _check_peer(self, peer: int) -> None:
        """Check the connection to a peer, and look its address up if it is down; PeerLost after
        the grace."""
        outbound = self._wire.reach(peer)
        seconds = 0.0 if outbound is None else outbound.seconds_down()
        if outbound is None or not seconds:
            return
        record = self._wire.endpoint.find(peer)
        moved = record is not None and self._wire.endpoint.move(outbound, record)
        if seconds > self._grace and not moved:
            raise PeerLost(
                f"rank {self.rank} lost its connection to rank {peer} {seconds:.1f} s ago",
                f"look at what happened to rank {peer}",
                peer=peer,
            )

    def _check_losses(self) -> None:
        """Raise PeerLost if a connection broke: a peer may wait for ever for lost messages."""
        for peer, outbound in self._wire.outbound.items():
            if outbound.has_broken and not self._forgives:
                raise PeerLost(
                    f"a connection of rank {self.rank} to rank {peer} broke",
                    f"look at what happened to rank {peer}",
                    peer=peer,
                )

    def _wait_on(
        self, outbound: Outbound, label: Label, deadline: float, message: Outgoing | None = None
    ) -> None:
        """Receive until there is progress on the connection, for a short time at most; not at all
        if this message is done."""
        self._inbox.refuse_if_closed("sends")
        peer, left = outbound.peer_record.rank, deadline - monotonic()
        if left <= 0:
            raise peer_late_error(self.rank, (Address(peer, label),))
        outbound.awaited = True
        is_done = message is not None and message.done  # before the connection was awaited
        if not is_done and not self._receive(min(left, SEND_CHECK_POLL_SECONDS)):
            self._raise_if_aborted()
            if peer in self._inbox.members:
                self._check_peer(peer)

    def _receive(self, seconds: float) -> bool:
        """Move arrived messages into the inbox; False if nothing happened in this time."""
        messages = self._wire.receive(seconds, self._place)
        for rank, header, array in messages or ():
            epoch, *label, _ = TCP_HEADER_STRUCT.unpack(header)
            self._inbox.put(Address(rank, Label(*label)), array, epoch)
        return messages is not None

    def _place(self, rank: int, header: bytes, nbytes: int) -> Landing | None:
        epoch, *label, _ = TCP_HEADER_STRUCT.unpack(header)
        if self._landings is None or epoch != self._inbox.membership_epoch:
            return None
        return self._landings(Address(rank, Label(*label)), nbytes)


@dataclass(slots=True, eq=False)
class _Queued:
    """A message that the socket did not accept at once."""

    transport: TcpTransport
    outbound: Outbound
    message: Outgoing
    label: Label

    @property
    def done(self) -> bool:
        return self.message.done

    def wait(self, deadline: float) -> None:
        self.transport.wait_for(self.outbound, self.message, self.label, deadline)

"""Over ZeroMQ: one inbound socket a rank, one outbound to each peer that it sends to.

A message is a header (sender, label, length) and the bytes, in one frame or more. Large ones are
sent from where they are, without a copy: ZeroMQ's thread may read them after `send` has returned,
until the sending is waited for. Queues are bounded: where one is full, `send` waits. Whatever waits
takes in what arrives meanwhile, so that two ranks with full queues don't wait for each other.

Connections belong to a formation: entering the next one breaks them off, so what waits in them is
gone at once, and makes them anew where they are needed.

A connection that breaks comes back by itself, also to a peer that is back at another address; what
was on its way is lost. A peer that is gone for longer than a short grace is lost: who waits for it
or sends to it is told. Who waits for a peer that it never sent to connects to it, to see that.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from threading import Lock
from time import monotonic, sleep

import torch
import zmq

from thalweg.errors import PeerLost
from thalweg.transports.connection import QUEUE, Connection
from thalweg.transports.door import Door
from thalweg.transports.framing import cut, joined
from thalweg.transports.inbox import Inbox, late
from thalweg.transports.line import Store
from thalweg.transports.protection import Protection
from thalweg.transports.refusal import Refusal
from thalweg.transports.transport import SENT, Address, Array, Label, Sending, in_bytes

# magic, version, zero, sender, formation, step, round, start, stop, bytes of the payload
HEADER = struct.Struct("<4sHHIQQIIIQ")
MAGIC, VERSION = b"thlw", 3
PURPOSE = "zeromq"
COPIED = 1 << 16  # bytes up to which a copy is cheaper than keeping track
LARGE = 31 << 20  # bytes, just below what glibc ever keeps for itself
LOOK = 0.1  # seconds of waiting after which connections are looked at
GRACE = 2.0  # seconds for a peer to come back


class ZeroMqTransport:
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
        protection: Protection | None = None,
        grace: float = GRACE,
        forgives: bool = True,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank = rank
        self._forgives = forgives
        self._look = look
        self._grace = grace
        self._door = Door(rank, store, host, purpose=PURPOSE, queue=QUEUE, protection=protection)
        self._inbound = self._door.inbound
        self._outbound: dict[int, Connection] = {}
        self._inbox = Inbox(rank, self._door.refused)
        self._in_use = Lock()  # sockets belong to one thread at a time
        _keep_freed_memory()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def refused(self) -> Mapping[Refusal, int]:
        """What came and wasn't handed out, and why."""
        return self._door.refused

    def meet_at(self, store: Store) -> None:
        """Look peers up in this store from now on, and be found there; RunError if it doesn't
        answer."""
        self._door.meet_at(store)

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        payload = in_bytes(array)
        with self._in_use:
            self._inbox.refuse_if_closed("sends")
            self._inbox.refuse_if_no_member(peer)
            formation = self._inbox.formation
            header = HEADER.pack(MAGIC, VERSION, 0, self._rank, formation, *label, payload.nbytes)
            socket = self._connection(peer, label, deadline).socket
            self._look_after(peer)
            while True:
                try:
                    socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
                    break
                except zmq.Again:
                    self._wait_for_room(socket, peer, label, deadline)
            if payload.nbytes <= COPIED:
                socket.send(payload.data)
                return SENT
            *first, last = cut(payload.data, self._door.frame)
            trackers = [socket.send(part, zmq.SNDMORE, copy=False, track=True) for part in first]
            trackers.append(socket.send(last, copy=False, track=True))
            return _Tracked(self, zmq.MessageTracker(*trackers), peer, label)

    def receive(self, peer: int, label: Label, deadline: float) -> Array:
        return self.receive_any((Address(peer, label),), deadline)[1]

    def receive_any(self, wanted: Collection[Address], deadline: float) -> tuple[Address, Array]:
        with self._in_use:
            while True:
                found = self._inbox.take_now(wanted)
                if found is not None:
                    return found
                if self._take_in():
                    continue
                left = deadline - monotonic()
                if left <= 0:
                    raise late(self._rank, wanted)
                if not self._inbound.poll(_milliseconds(min(left, LOOK))):
                    for peer in {address.peer for address in wanted}:
                        self._look_after(peer)
                    self._look_for_losses()

    def keep_up(self, peer: int) -> None:
        """What there is to do while a message to this peer leaves."""
        self._look()
        with self._in_use:
            self._inbox.refuse_if_closed("sends")
            self._take_in()
            if self._inbox.has_member(peer):
                self._look_after(peer)

    def look_about(self) -> None:
        with self._in_use:
            self._look_for_losses()

    def enter(self, formation: int, members: Collection[int]) -> None:
        """ZeroMQ may go on for a moment to read what was sent without a copy: such a sending is
        still to be waited for before its array is changed."""
        with self._in_use:
            self._inbox.enter(formation, members)
            while self._outbound:
                _, connection = self._outbound.popitem()
                connection.close(linger=0)

    def close(self) -> None:
        """Also lets what was sent last leave, for a moment."""
        if self._inbox.closed:
            return
        self._inbox.close()
        with self._in_use:
            self._inbound.close(linger=0)
            for connection in self._outbound.values():
                connection.close()
            self._door.close()

    def _connection(self, peer: int, label: Label, deadline: float) -> Connection:
        if peer not in self._outbound:
            while (card := self._door.find(peer)) is None:
                if monotonic() >= deadline:
                    raise late(self._rank, (Address(peer, label),))
                self._look()
                sleep(LOOK / 10)
            self._outbound[peer] = self._door.connect(card)
        return self._outbound[peer]

    def _look_after(self, peer: int) -> None:
        """See whether the peer is there, and look for it if not; PeerLost if it was gone long."""
        connection = self._outbound.get(peer)
        if connection is None:
            card = self._door.find(peer)
            if card is not None:
                self._outbound[peer] = self._door.connect(card)
            return
        seconds = connection.seconds_down()
        if not seconds:
            return
        card = self._door.find(peer)
        moved = card is not None and connection.move_to(card)
        if seconds > self._grace and not moved:
            raise PeerLost(
                f"rank {self._rank} lost its connection to rank {peer} {seconds:.1f} s ago",
                f"look at what happened to rank {peer}",
                peer=peer,
            )

    def _look_for_losses(self) -> None:
        """Somebody may wait for ever for what was on its way when a connection broke."""
        for peer, connection in self._outbound.items():
            connection.hear()
            if connection.broke and not self._forgives:
                raise PeerLost(
                    f"a connection of rank {self._rank} to rank {peer} broke",
                    f"look at what happened to rank {peer}",
                    peer=peer,
                )

    def _wait_for_room(
        self, socket: zmq.Socket[bytes], peer: int, label: Label, deadline: float
    ) -> None:
        self._inbox.refuse_if_closed("sends")
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLOUT)
        poller.register(self._inbound, zmq.POLLIN)
        left = deadline - monotonic()
        if left <= 0:
            raise late(self._rank, (Address(peer, label),))
        if not poller.poll(_milliseconds(min(left, LOOK))):
            self._look()
            self._look_after(peer)
        self._take_in()

    def _take_in(self) -> bool:
        """Move what has arrived into the inbox; whether there was anything."""
        any_came = False
        with suppress(zmq.Again):
            while True:
                frames = self._inbound.recv_multipart(zmq.NOBLOCK, copy=False)
                any_came = True
                self._sort_in(frames)
        return any_came

    def _sort_in(self, frames: list[zmq.Frame]) -> None:
        try:
            magic, version, _, sender, formation, *label, nbytes = HEADER.unpack(frames[0].buffer)
        except struct.error:
            magic, version = b"", 0
        if (magic, version) != (MAGIC, VERSION) or len(frames) < 2:
            self._door.refused.count(Refusal.MALFORMED)
        elif not self._door.speaks_for(frames[0], sender):
            self._door.refused.count(Refusal.FORGED)
        else:
            array = joined(frames[1:], nbytes)
            if isinstance(array, Refusal):
                self._door.refused.count(array)
            else:
                self._inbox.put(Address(sender, Label(*label)), array, formation)


class _Tracked:
    """Sent without a copy: ZeroMQ says when it is done with the array."""

    def __init__(
        self, transport: ZeroMqTransport, tracker: zmq.MessageTracker, peer: int, label: Label
    ) -> None:
        self._transport = transport
        self._tracker = tracker
        self._address = Address(peer, label)

    def wait(self, deadline: float) -> None:
        while not self._tracker.done:
            left = deadline - monotonic()
            if left <= 0:
                raise late(self._transport.rank, (self._address,))
            try:
                self._tracker.wait(min(left, LOOK))
            except zmq.NotDone:
                self._transport.keep_up(self._address.peer)


def _keep_freed_memory() -> None:
    """Let the allocator keep what it frees, up to its own limit. ZeroMQ allocates every message
    that comes in; glibc hands large blocks back to the kernel at once, and takes them again page
    by page, until it has seen a large one freed: let it see one."""
    torch.empty(LARGE, dtype=torch.uint8)


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))

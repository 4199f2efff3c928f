"""Over ZeroMQ: one inbound socket a rank, one outbound to each peer that it sends to.

A message is two frames: a header (sender, label) and the bytes. Large ones are sent from where they
are, without a copy: ZeroMQ's thread may read them after `send` has returned, until the sending is
waited for. Queues are bounded: where one is full, `send` waits. Whatever waits takes in what
arrives meanwhile, so that two ranks with full queues don't wait for each other.

A connection that breaks comes back by itself, also to a peer that is back at another address; what
was on its way is lost. A peer that is gone for longer than a short grace is lost: who waits for it
or sends to it is told. Who waits for a peer that it never sent to connects to it, to see that.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from contextlib import suppress
from threading import Lock
from time import monotonic, sleep

import numpy as np
import torch
import zmq
from torch._C._distributed_c10d import Store

from thalweg.errors import PeerLost, RunError
from thalweg.transports.connection import Connection, listen
from thalweg.transports.inbox import Inbox, late
from thalweg.transports.line import Line
from thalweg.transports.transport import SENT, Address, Array, Label, Sending, in_bytes

HEADER = struct.Struct("<4sHHIQIII")  # magic, version, zero, sender, step, round, start, stop
MAGIC, VERSION = b"thlw", 1
COPIED = 1 << 16  # bytes up to which a copy is cheaper than keeping track
LARGE = 31 << 20  # bytes, just below what glibc ever keeps for itself
LOOK = 0.1  # seconds of waiting after which connections are looked at
GRACE = 2.0  # seconds for a peer to come back


class ZeroMqTransport:
    """`store` tells the ranks of one another's addresses; `host` is this one's."""

    def __init__(self, rank: int, store: Store, host: str = "127.0.0.1") -> None:
        self._rank = rank
        self._line = Line(store, rank)
        self._context = zmq.Context(io_threads=1)
        self._inbound, endpoint = listen(self._context, rank, host)
        store.set(_key(rank), endpoint)
        self._outbound: dict[int, Connection] = {}
        self._inbox = Inbox(rank)
        self._in_use = Lock()  # sockets belong to one thread at a time
        _keep_freed_memory()

    @property
    def rank(self) -> int:
        return self._rank

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        header = HEADER.pack(MAGIC, VERSION, 0, self._rank, *label)
        payload = in_bytes(array)
        with self._in_use:
            self._inbox.refuse_if_closed("sends")
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
            return _Tracked(self, socket.send(payload.data, copy=False, track=True), peer, label)

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

    def keep_up(self, peer: int) -> None:
        """What there is to do while a message to this peer leaves."""
        with self._in_use:
            self._inbox.refuse_if_closed("sends")
            self._take_in()
            self._look_after(peer)

    def close(self) -> None:
        """Also lets what was sent last leave, for a moment."""
        if self._inbox.closed:
            return
        self._inbox.close()
        with self._in_use:
            self._inbound.close(linger=0)
            for connection in self._outbound.values():
                connection.close()
            self._context.term()

    def _connection(self, peer: int, label: Label, deadline: float) -> Connection:
        if peer not in self._outbound:
            endpoint = self._endpoint(peer, deadline - monotonic())
            if endpoint is None:
                raise late(self._rank, (Address(peer, label),))
            self._outbound[peer] = Connection(self._context, peer, endpoint)
        return self._outbound[peer]

    def _endpoint(self, peer: int, seconds: float = 0.0) -> str | None:
        """Where the peer listens; None if that isn't known in time."""
        deadline = monotonic() + seconds
        with suppress(RunError):  # the store is gone
            while not self._line.ask(lambda store: store.check([_key(peer)])):
                if monotonic() >= deadline:
                    return None
                sleep(LOOK / 10)
            return self._line.ask(lambda store: store.get(_key(peer))).decode()
        return None

    def _look_after(self, peer: int) -> None:
        """See whether the peer is there, and look for it if not; PeerLost if it was gone long."""
        connection = self._outbound.get(peer)
        if connection is None:
            endpoint = self._endpoint(peer)
            if endpoint is not None:
                self._outbound[peer] = Connection(self._context, peer, endpoint)
            return
        seconds = connection.seconds_down()
        if not seconds:
            return
        endpoint = self._endpoint(peer)
        moved = endpoint is not None and connection.move_to(endpoint)
        if seconds > GRACE and not moved:
            raise PeerLost(
                f"rank {self._rank} lost its connection to rank {peer} {seconds:.1f} s ago",
                f"look at what happened to rank {peer}",
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
            self._look_after(peer)
        self._take_in()

    def _take_in(self) -> bool:
        """Move what has arrived into the inbox; whether there was anything."""
        any_came = False
        with suppress(zmq.Again):
            while True:
                frames = self._inbound.recv_multipart(zmq.NOBLOCK, copy=False)
                any_came = True
                address = self._read(frames[0])
                if address is not None and len(frames) == 2:
                    self._inbox.put(address, np.frombuffer(frames[1].buffer, np.uint8))
        return any_came

    def _read(self, frame: zmq.Frame) -> Address | None:
        """Who sent what; None if it isn't from one of us."""
        try:
            magic, version, _, sender, *label = HEADER.unpack(frame.buffer)
        except struct.error:
            return None
        return Address(sender, Label(*label)) if (magic, version) == (MAGIC, VERSION) else None


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


def _key(rank: int) -> str:
    return f"zeromq/{rank}"


def _keep_freed_memory() -> None:
    """Let the allocator keep what it frees, up to its own limit. ZeroMQ allocates every message
    that comes in; glibc hands large blocks back to the kernel at once, and takes them again page
    by page, until it has seen a large one freed: let it see one."""
    torch.empty(LARGE, dtype=torch.uint8)


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))

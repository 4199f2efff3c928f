"""Over ZeroMQ: one inbound socket a rank, one outbound to each peer that it sends to.

A message is two frames: a header (sender, label) and the bytes. Large ones are sent from where they
are, without a copy: ZeroMQ's thread may read them after `send` has returned, until the sending is
waited for. Connections come back by themselves when a peer was gone. Queues are bounded: where one
is full, `send` waits, and takes in what arrives meanwhile, so that two ranks with full queues don't
wait for each other.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from time import monotonic

import numpy as np
import torch
import torch.distributed as dist
import zmq
from torch._C._distributed_c10d import Store

from thalweg.errors import PeerLate, TransportClosed, TransportError
from thalweg.transports.inbox import Inbox, late
from thalweg.transports.transport import SENT, Address, Array, Label, Sending

HEADER = struct.Struct("<4sHHIQIII")  # magic, version, zero, sender, step, round, start, stop
MAGIC, VERSION = b"thlw", 1
COPIED = 1 << 16  # bytes up to which a copy is cheaper than keeping track
QUEUE = 256  # messages to or from one peer
LARGE = 31 << 20  # bytes, just below what glibc ever keeps for itself
LINGER = 2.0  # seconds for what was sent last to leave when the transport closes


class ZeroMqTransport:
    """`store` tells the ranks of one another's addresses; `host` is this one's."""

    def __init__(self, rank: int, store: Store, host: str = "127.0.0.1") -> None:
        self._rank = rank
        self._store = store
        self._context = zmq.Context(io_threads=1)
        self._inbound = self._context.socket(zmq.PULL)
        self._inbound.setsockopt(zmq.RCVHWM, QUEUE)
        self._inbound.setsockopt(zmq.IPV6, int(":" in host))
        try:
            port = self._inbound.bind_to_random_port(f"tcp://{_bracketed(host)}")
        except zmq.ZMQError as error:
            raise TransportError(
                f"rank {rank} can't listen on {host}: {error}", "name another address"
            ) from None
        store.set(f"zeromq/{rank}", f"tcp://{_bracketed(host)}:{port}")
        self._outbound: dict[int, zmq.Socket[bytes]] = {}
        self._inbox = Inbox(rank)
        _keep_freed_memory()

    @property
    def rank(self) -> int:
        return self._rank

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        if self._inbox.closed:
            raise TransportClosed(f"rank {self._rank} sends after close()", "send before it")
        socket = self._outbound.get(peer) or self._connect(peer, label, deadline)
        header = HEADER.pack(MAGIC, VERSION, 0, self._rank, *label)
        while True:
            try:
                socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
                break
            except zmq.Again:
                self._wait_for_room(socket, peer, label, deadline)
        if array.nbytes <= COPIED:
            socket.send(array.data)
            return SENT
        tracker = socket.send(array.data, copy=False, track=True)
        return _Tracked(tracker, self._rank, peer, label)

    def receive(self, peer: int, label: Label, deadline: float) -> Array:
        return self.receive_any((Address(peer, label),), deadline)[1]

    def receive_any(self, wanted: Collection[Address], deadline: float) -> tuple[Address, Array]:
        while True:
            found = self._inbox.take_now(wanted)
            if found is not None:
                return found
            if not self._take_in():
                left = deadline - monotonic()
                if left <= 0 or not self._inbound.poll(_milliseconds(left)):
                    raise late(self._rank, wanted)

    def forget(self, step: int, round_number: int) -> None:
        self._inbox.forget(step, round_number)

    def close(self) -> None:
        """Also lets what was sent last leave, for a moment."""
        if self._inbox.closed:
            return
        self._inbox.close()
        self._inbound.close(linger=0)
        for socket in self._outbound.values():
            socket.close(linger=_milliseconds(LINGER))
        self._context.term()

    def _connect(self, peer: int, label: Label, deadline: float) -> zmq.Socket[bytes]:
        key = f"zeromq/{peer}"
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, deadline - monotonic())))
            endpoint = self._store.get(key).decode()
        except dist.DistError:
            raise late(self._rank, (Address(peer, label),)) from None
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, QUEUE)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        socket.connect(endpoint)
        self._outbound[peer] = socket
        return socket

    def _wait_for_room(
        self, socket: zmq.Socket[bytes], peer: int, label: Label, deadline: float
    ) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLOUT)
        poller.register(self._inbound, zmq.POLLIN)
        left = deadline - monotonic()
        if left <= 0 or not poller.poll(_milliseconds(left)):
            raise late(self._rank, (Address(peer, label),))
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

    def __init__(self, tracker: zmq.MessageTracker, rank: int, peer: int, label: Label) -> None:
        self._tracker = tracker
        self._rank = rank
        self._peer = peer
        self._label = label

    def wait(self, deadline: float) -> None:
        if self._tracker.done:
            return
        try:
            self._tracker.wait(max(0.0, deadline - monotonic()))
        except zmq.NotDone:
            raise PeerLate(
                rank=self._rank,
                peers=(self._peer,),
                step=self._label.step,
                round_number=self._label.round,
            ) from None


def _keep_freed_memory() -> None:
    """Let the allocator keep what it frees, up to its own limit. ZeroMQ allocates every message
    that comes in; glibc hands large blocks back to the kernel at once, and takes them again page
    by page, until it has seen a large one freed: let it see one."""
    torch.empty(LARGE, dtype=torch.uint8)


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

"""Messages between ranks over TCP: the common part of the transport and the best-effort transport.

One thread sends and receives. It writes to sockets itself, and reads from them when it waits;
meanwhile, the network thread (`endpoint`) writes the rest.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from time import monotonic, sleep

from thalweg.errors import TransportError
from thalweg.transports.cipher import RecordCipher
from thalweg.transports.connection import (
    ChooseLanding,
    Inbound,
    Outbound,
    Outgoing,
    Received,
    RejectedMessage,
)
from thalweg.transports.endpoint import Endpoint
from thalweg.transports.peer_record import PeerRecord
from thalweg.transports.selector import READ_EVENT, WRITE_EVENT, WakeableSelector

SEND_LINGER_SECONDS = 2.0  # for the last messages to be written
SEND_LINGER_POLL_SECONDS = 0.005


def in_new_memory(rank: int, header: bytes, nbytes: int) -> None:
    """Choose new memory for every payload."""


class Wire:
    """The connections of an endpoint, whose messages have headers of `header_nbytes`."""

    def __init__(self, endpoint: Endpoint, header_nbytes: int) -> None:
        self.endpoint = endpoint
        self.outbound: dict[int, Outbound] = {}
        self._inbound: set[Inbound] = set()
        self._header_nbytes = header_nbytes
        self._full: list[Outbound] = []  # connections whose socket accepts no more
        self._selector = WakeableSelector()
        # In a fork nobody may send: two writers would encrypt different texts under the same nonce.
        self.owner_pid = os.getpid()
        self.wake = self._selector.wake
        endpoint.start(self._admit, self.wake)

    def connect(self, record: PeerRecord) -> Outbound:
        """Return a connection to this peer, which opens in the background."""
        outbound = self.outbound[record.rank] = Outbound(record)
        self.endpoint.dial(outbound)
        return outbound

    def reach(self, peer: int) -> Outbound | None:
        """Return the connection to a peer, and open one if there is none; None if the peer has no
        record."""
        outbound = self.outbound.get(peer)
        if outbound is None:
            record = self.endpoint.find(peer)
            return None if record is None else self.connect(record)
        return outbound

    def send(self, outbound: Outbound, header: bytes, payload: memoryview) -> Outgoing:
        """Write the message, or queue it if the socket is full or not open."""
        if os.getpid() != self.owner_pid:
            raise TransportError(
                f"rank {self.endpoint.rank} sends from a fork of its process",
                "communicate in the process that attached",
            )
        message = Outgoing(header, payload)
        with outbound.lock:
            idle = outbound.is_empty and outbound.socket is not None
            outbound.queue.append(message)
            if idle and not self._flush(outbound):
                self._full.append(outbound)
                self.endpoint.write_on(outbound)
        return message

    def receive(
        self, seconds: float | None, place: ChooseLanding = in_new_memory
    ) -> list[Received] | None:
        """Wait for messages, a change of a connection, or `wake`; None if nothing happened in this
        time. While it waits, this thread also writes the rest of messages; otherwise the network
        thread does."""
        writing = self._write_here() if self._full else ()
        until = None if seconds is None else monotonic() + seconds
        messages: list[Received] = []
        try:
            while True:
                ready = self._selector.select(seconds)
                if not ready:
                    return None
                woken = False
                for key, _ in ready:
                    if isinstance(key.data, Inbound):
                        self._read(key.data, messages, place)
                    elif isinstance(key.data, Outbound):
                        woken = self._write(key.data) or woken
                    else:
                        key.data()
                        woken = True
                if messages or woken or until is None:
                    return messages
                seconds = max(0.0, until - monotonic())
        finally:
            if writing:
                self._write_there(writing)

    def hang_up(self) -> None:
        """Close all connections to peers and drop their messages."""
        while self.outbound:
            self.endpoint.hang_up(self.outbound.popitem()[1])

    def detach_targets(self) -> None:
        """Let no incoming message write to its target."""
        for inbound in tuple(self._inbound):
            inbound.detach_target()

    def close(self, lingers: Iterable[Outbound]) -> None:
        """Close all connections after a short time for the messages in these to be written."""
        deadline = monotonic() + SEND_LINGER_SECONDS
        for outbound in lingers:
            while not outbound.is_empty and outbound.down_since is None and monotonic() < deadline:
                sleep(SEND_LINGER_POLL_SECONDS)
        self.hang_up()
        self.endpoint.close()
        for inbound in tuple(self._inbound):
            inbound.socket.close()
        self._selector.close()

    def _admit(self, connection: socket.socket, rank: int, cipher: RecordCipher | None) -> None:
        """Receive from this connection; the network thread calls this."""
        inbound = Inbound(connection, rank, cipher, self._header_nbytes)
        self._inbound.add(inbound)
        self._register(connection, READ_EVENT, inbound)

    def _flush(self, outbound: Outbound) -> bool:
        """Write what the socket accepts; True if nothing is left. The lock is held."""
        try:
            return outbound.flush()
        except OSError:
            self.endpoint.mark_broken(outbound)
            return True

    def _write_here(self) -> list[tuple[Outbound, int]]:
        """Watch full sockets in this thread's selector instead of the network thread's."""
        full, self._full = self._full, []
        writing = []
        for outbound in full:
            with outbound.lock:
                if outbound.socket is not None and not outbound.is_empty:
                    self.endpoint.write_on(outbound, here=False)
                    writing.append((outbound, outbound.socket.fileno()))
                    self._register(outbound.socket, WRITE_EVENT, outbound)
        return writing

    def _write_there(self, writing: list[tuple[Outbound, int]]) -> None:
        """Return full sockets to the network thread."""
        for outbound, descriptor in writing:
            self._unregister(descriptor, outbound)
            with outbound.lock:
                if outbound.socket is not None and not outbound.is_empty:
                    self.endpoint.write_on(outbound)
                    self._full.append(outbound)

    def _write(self, outbound: Outbound) -> bool:
        """Continue to write; True if a thread waits for this connection."""
        with outbound.lock:
            if outbound.socket is not None:
                descriptor = outbound.socket.fileno()
                if self._flush(outbound):
                    self._unregister(descriptor, outbound)
            awaited, outbound.awaited = outbound.awaited, False
        return awaited

    def _register(self, connection: socket.socket, events: int, data: object) -> None:
        try:
            self._selector.register(connection, events, data)
        except KeyError:  # the descriptor of a closed socket
            self._selector.unregister(connection.fileno())
            self._selector.register(connection, events, data)

    def _unregister(self, descriptor: int, outbound: Outbound) -> None:
        """Forget this descriptor of a connection, unless another one has it by now."""
        key = self._selector.get_map().get(descriptor)
        if key is not None and key.data is outbound:
            self._selector.unregister(descriptor)

    def _read(self, inbound: Inbound, messages: list[Received], place: ChooseLanding) -> None:
        try:
            is_open = inbound.read(messages, place)
        except RejectedMessage as rejected:
            self.endpoint.refused.count(rejected.why, peer=inbound.rank)
            is_open = False
        if not is_open:
            self._inbound.discard(inbound)
            self._selector.unregister(inbound.socket)
            inbound.socket.close()

"""Best-effort messages between ranks, for plans that wait for nobody.

Unlike a transport's messages, these may be lost: one to a peer that is gone, or that is so slow
that its queue is full, is dropped, so `send` never waits and stale messages can't pile up. A rank
that needs more asks again. A peer that restarts at another address publishes it in its first
message to each of its neighbours.

One thread waits for messages, for changes of connections and for `wake`, and never polls.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from threading import Lock
from time import monotonic, sleep
from typing import NamedTuple

import numpy as np
from torch._C._distributed_c10d import Store

from thalweg.errors import PeerLost
from thalweg.transports.connection import EMPTY_ARRAY, Received
from thalweg.transports.endpoint import Endpoint
from thalweg.transports.rejections import RejectionReason
from thalweg.transports.security import SecurityConfig
from thalweg.transports.transport import Array
from thalweg.transports.wire import Wire

# kind, whether there is an array, step, piece, covered, bytes of the payload
POST_HEADER_STRUCT = struct.Struct("<BBQIIQ")
POST_PURPOSE = "post"
ADDRESS_POLL_SECONDS = 0.02


class MessageKind(IntEnum):
    """The purpose of a best-effort message."""

    HELLO = 0  # the sender's new record after a restart
    ANSWER = 1  # a child's sum
    RESULT = 2  # the sum from the parent
    FOLLOW = 3  # request for results from this step on, as the sender's parent is gone
    REQUEST_PARTIAL = 4  # a parent's request for an incomplete sum
    PARTIAL = 5  # a child's incomplete sum
    REQUEST = 6  # request for the receiver's state
    STATE = 7  # the state; without an array: the sender needs one itself
    LEAVE = 8  # end of FOLLOW, as the sender's parent is back
    BARRIER = 9  # request for the receiver's state once all ranks request it


class BestEffortMessage(NamedTuple):
    """A message; `covered` is the number of data cells in its sum; 0: all that belong there."""

    peer: int  # sender or receiver
    kind: MessageKind
    step: int
    piece: int = 0
    covered: int = 0
    array: Array | None = None


class BestEffortTransport:
    """A transport whose messages may be lost. `queue` is the most that may wait for one peer.
    Messages of another `namespace`, whose transport had this address before, are rejected."""

    def __init__(
        self,
        rank: int,
        store: Store,
        host: str = "127.0.0.1",
        queue: int = 64,
        security: SecurityConfig | None = None,
        namespace: str = "",
    ) -> None:
        self.rank = rank
        self._queue = queue
        self._endpoint = Endpoint(
            rank, store, host, purpose=POST_PURPOSE, security=security, namespace=namespace
        )
        self._wire = Wire(self._endpoint, POST_HEADER_STRUCT.size)
        self.wake = self._wire.wake  # ends the wait of the thread that receives
        self.endpoint = self._endpoint.record.endpoint
        self.refused: Mapping[RejectionReason, int] = self._endpoint.refused
        self._closing = Lock()
        self._closed = False

    def wait_for_peers(self, peers: Iterable[int], deadline: float) -> None:
        """Connect to these peers; PeerLost if one has no address by the deadline."""
        for peer in peers:
            while self._wire.reach(peer) is None:
                if monotonic() >= deadline:
                    raise PeerLost(
                        f"rank {peer} hasn't joined",
                        "is it running, with the same plan?",
                        peer=peer,
                    )
                sleep(ADDRESS_POLL_SECONDS)

    def send(self, message: BestEffortMessage) -> bool:
        """Send a message; False if it was dropped."""
        outbound = self._wire.reach(message.peer)
        if outbound is None:
            return False
        is_gone = (
            outbound.down_since is not None and outbound.has_broken
        )  # one that never was up may only be slow
        if is_gone or len(outbound.queue) >= self._queue:
            return False
        _, kind, step, piece, covered, array = message
        payload = (
            EMPTY_ARRAY if array is None else np.ascontiguousarray(array).reshape(-1).view("u1")
        )
        has_array = array is not None
        header = POST_HEADER_STRUCT.pack(kind, has_array, step, piece, covered, payload.nbytes)
        self._wire.send(outbound, header, payload.data)
        return True

    def receive(self, seconds: float | None) -> list[BestEffortMessage]:
        """Wait for messages, `wake`, a change of a connection or the end of this time, and return
        the messages."""
        received = self._wire.receive(None if seconds is None else max(0.0, seconds))
        messages = (self._read(message) for message in received or ())
        return [message for message in messages if message is not None]

    def is_down(self, peer: int) -> bool:
        outbound = self._wire.outbound.get(peer)
        return outbound is not None and outbound.down_since is not None

    def seconds_down(self, peer: int) -> float:
        outbound = self._wire.outbound.get(peer)
        return 0.0 if outbound is None else outbound.seconds_down()

    def hello(self, peer: int) -> BestEffortMessage:
        """A message with the current record of this rank."""
        record = np.frombuffer(self._endpoint.identity.text, np.uint8)
        return BestEffortMessage(peer, MessageKind.HELLO, 0, array=record)

    def close(self) -> None:
        """Close after a short time for the last messages to be written, if the peer is up."""
        if os.getpid() != self._wire.owner_pid:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._wire.close(list(self._wire.outbound.values()))

    def _read(self, message: Received) -> BestEffortMessage | None:
        """Decode a message; None if it is rejected."""
        sender, header, array = message
        kind, has_array, step, piece, covered, _ = POST_HEADER_STRUCT.unpack(header)
        try:
            read = BestEffortMessage(
                sender, MessageKind(kind), step, piece, covered, array if has_array else None
            )
        except ValueError:
            self._endpoint.refused.count(RejectionReason.MALFORMED)
            return None
        if read.kind is MessageKind.HELLO:
            record = self._endpoint.trusted(array.tobytes(), sender)
            if record is None:
                return None
            outbound = self._wire.outbound.get(sender)
            if outbound is None:
                self._wire.connect(record)
            else:
                self._endpoint.move(outbound, record)
        return read

"""Letters between ranks, for plans that wait for nobody.

Unlike a transport's messages, letters may be lost: one to a peer that is gone, or that is so slow
that its queue is full, is dropped, so `send` never waits and what is late can't pile up. Whoever
needs more than that asks again. A peer that comes back at another address says so in its first
letter to each of its neighbours.

One thread waits for letters, for news of connections and for `wake`, and never looks in between.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from threading import Lock
from time import monotonic, sleep
from typing import NamedTuple

import numpy as np
from torch._C._distributed_c10d import Store

from thalweg.errors import PeerLost
from thalweg.transports.connection import Received
from thalweg.transports.peer_record import PeerRecord
from thalweg.transports.rejections import RejectionReason
from thalweg.transports.security import SecurityConfig
from thalweg.transports.transport import Array
from thalweg.transports.wire import Wire

# sort, whether there is an array, step, piece, covered, bytes of the payload
POST_HEADER_STRUCT = struct.Struct("<BBQIIQ")
POST_PURPOSE = "post"
ADDRESS_POLL_SECONDS = 0.02  # seconds between two looks for a peer's address
EMPTY_PAYLOAD = np.empty(0, np.uint8)


class MessageKind(IntEnum):
    """What a letter is."""

    HELLO = 0  # "I am back, and this is my card"
    ANSWER = 1  # a child's sum
    RESULT = 2  # from above
    FOLLOW = 3  # "send me results, from this step on": the sender's parent is gone
    REQUEST_PARTIAL = 4  # from above: "send what you have"
    PARTIAL = 5  # what a child had
    REQUEST = 6  # "send me your state"
    STATE = 7  # here it is; or, without one, "I need one myself"
    LEAVE = 8  # "my parent is back"
    BARRIER = 9  # "send me your state when everybody asks for it"


class BestEffortMessage(NamedTuple):
    """`covered` is how many cells of the data are in it; 0: all that belong there."""

    peer: int  # who sent it, or is to get it
    kind: MessageKind
    step: int
    piece: int = 0
    covered: int = 0
    array: Array | None = None


class BestEffortTransport:
    """`queue` is how many letters may wait for one peer. `room` is what its letters are for: those
    for another, which was at this address before, are refused."""

    def __init__(
        self,
        rank: int,
        store: Store,
        host: str = "127.0.0.1",
        queue: int = 64,
        security: SecurityConfig | None = None,
        room: str = "",
    ) -> None:
        self.rank = rank
        self._queue = queue
        self._wire = Wire(
            rank,
            store,
            host,
            purpose=POST_PURPOSE,
            header_nbytes=POST_HEADER_STRUCT.size,
            security=security,
            room=room,
        )
        self._endpoint = self._wire.endpoint
        self._closing = Lock()
        self._closed = False

    @property
    def endpoint(self) -> str:
        return self._endpoint.record.endpoint

    @property
    def refused(self) -> Mapping[RejectionReason, int]:
        """What came and wasn't handed out, and why."""
        return self._endpoint.refused

    def wait_for_peers(self, peers: Iterable[int], deadline: float) -> None:
        """Connect to these; PeerLost if one has no address by the deadline."""
        for peer in peers:
            while (record := self._endpoint.find(peer)) is None:
                if monotonic() >= deadline:
                    raise PeerLost(
                        f"rank {peer} hasn't come", "is it running, with the same plan?", peer=peer
                    )
                sleep(ADDRESS_POLL_SECONDS)
            self._wire.connect(record)

    def send(self, message: BestEffortMessage) -> bool:
        """False if it was dropped."""
        outbound = self._wire.outbound.get(message.peer)
        if outbound is None:
            record = self._endpoint.find(message.peer)
            if record is None:
                return False
            outbound = self._wire.connect(record)
        is_gone = outbound.down and outbound.has_broken  # one that was never there may only be slow
        if is_gone or len(outbound.queue) >= self._queue:
            return False
        _, sort, step, piece, covered, array = message
        payload = (
            EMPTY_PAYLOAD if array is None else np.ascontiguousarray(array).reshape(-1).view("u1")
        )
        has_array = array is not None
        header = POST_HEADER_STRUCT.pack(sort, has_array, step, piece, covered, payload.nbytes)
        self._wire.send(outbound, header, payload.data)
        return True

    def receive(self, seconds: float | None) -> list[BestEffortMessage]:
        """What has come; waits until something has, or `wake` was called, or a connection came up
        or went down, or the time is over."""
        came = self._wire.receive(None if seconds is None else max(0.0, seconds))
        letters = (self._read(message) for message in came or ())
        return [letter for letter in letters if letter is not None]

    def wake(self) -> None:
        """From any thread."""
        with self._closing:
            if not self._closed:
                self._wire.wake()

    def is_down(self, peer: int) -> bool:
        outbound = self._wire.outbound.get(peer)
        return outbound is not None and outbound.down

    def seconds_down(self, peer: int) -> float:
        outbound = self._wire.outbound.get(peer)
        return 0.0 if outbound is None else outbound.seconds_down()

    def hello(self, peer: int) -> BestEffortMessage:
        """Tells where this rank is now."""
        card = np.frombuffer(self._endpoint.text, np.uint8)
        return BestEffortMessage(peer, MessageKind.HELLO, 0, array=card)

    def close(self) -> None:
        """What was sent last may leave, for a moment, if somebody is there."""
        if self._wire.is_fork:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._wire.close(list(self._wire.outbound.values()))

    def _read(self, message: Received) -> BestEffortMessage | None:
        """None if it is refused."""
        sender, header, array = message
        sort, has_array, step, piece, covered, _ = POST_HEADER_STRUCT.unpack(header)
        try:
            letter = BestEffortMessage(
                sender, MessageKind(sort), step, piece, covered, array if has_array else None
            )
        except ValueError:
            self._endpoint.refused.count(RejectionReason.MALFORMED)
            return None
        if letter.kind is MessageKind.HELLO:
            record = self._endpoint.trusted(array.tobytes(), sender)
            if record is None:
                return None
            self._move(record)
        return letter

    def _move(self, record: PeerRecord) -> None:
        outbound = self._wire.outbound.get(record.rank)
        if outbound is None:
            self._wire.connect(record)
        else:
            self._endpoint.move(outbound, record)

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
from thalweg.transports.peer_record import Card
from thalweg.transports.rejections import Refusal
from thalweg.transports.security import Protection
from thalweg.transports.transport import Array
from thalweg.transports.wire import Wire

# sort, whether there is an array, step, piece, covered, bytes of the payload
HEADER = struct.Struct("<BBQIIQ")
PURPOSE = "post"
PAUSE = 0.02  # seconds between two looks for a peer's address
NOTHING = np.empty(0, np.uint8)


class Sort(IntEnum):
    """What a letter is."""

    HELLO = 0  # "I am back, and this is my card"
    ANSWER = 1  # a child's sum
    RESULT = 2  # from above
    FOLLOW = 3  # "send me results, from this step on": the sender's parent is gone
    HURRY = 4  # from above: "send what you have"
    PARTIAL = 5  # what a child had
    ASK = 6  # "send me your state"
    STATE = 7  # here it is; or, without one, "I need one myself"
    LEAVE = 8  # "my parent is back"
    MEET = 9  # "send me your state when everybody asks for it"


class Letter(NamedTuple):
    """`covered` is how many cells of the data are in it; 0: all that belong there."""

    peer: int  # who sent it, or is to get it
    sort: Sort
    step: int
    piece: int = 0
    covered: int = 0
    array: Array | None = None


class Post:
    """`queue` is how many letters may wait for one peer. `room` is what its letters are for: those
    for another, which was at this address before, are refused."""

    def __init__(
        self,
        rank: int,
        store: Store,
        host: str = "127.0.0.1",
        queue: int = 64,
        protection: Protection | None = None,
        room: str = "",
    ) -> None:
        self.rank = rank
        self._queue = queue
        self._wire = Wire(
            rank,
            store,
            host,
            purpose=PURPOSE,
            header_nbytes=HEADER.size,
            protection=protection,
            room=room,
        )
        self._door = self._wire.door
        self._closing = Lock()
        self._closed = False

    @property
    def endpoint(self) -> str:
        return self._door.card.endpoint

    @property
    def refused(self) -> Mapping[Refusal, int]:
        """What came and wasn't handed out, and why."""
        return self._door.refused

    def meet(self, peers: Iterable[int], deadline: float) -> None:
        """Connect to these; PeerLost if one has no address by the deadline."""
        for peer in peers:
            while (card := self._door.find(peer)) is None:
                if monotonic() >= deadline:
                    raise PeerLost(
                        f"rank {peer} hasn't come", "is it running, with the same plan?", peer=peer
                    )
                sleep(PAUSE)
            self._wire.connect(card)

    def send(self, letter: Letter) -> bool:
        """False if it was dropped."""
        outbound = self._wire.outbound.get(letter.peer)
        if outbound is None:
            card = self._door.find(letter.peer)
            if card is None:
                return False
            outbound = self._wire.connect(card)
        is_gone = outbound.down and outbound.broke  # one that was never there may only be slow
        if is_gone or len(outbound.queue) >= self._queue:
            return False
        _, sort, step, piece, covered, array = letter
        payload = NOTHING if array is None else np.ascontiguousarray(array).reshape(-1).view("u1")
        has_array = array is not None
        header = HEADER.pack(sort, has_array, step, piece, covered, payload.nbytes)
        self._wire.send(outbound, header, payload.data)
        return True

    def receive(self, seconds: float | None) -> list[Letter]:
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

    def hello(self, peer: int) -> Letter:
        """Tells where this rank is now."""
        card = np.frombuffer(self._door.text, np.uint8)
        return Letter(peer, Sort.HELLO, 0, array=card)

    def close(self) -> None:
        """What was sent last may leave, for a moment, if somebody is there."""
        if self._wire.is_fork:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._wire.close(list(self._wire.outbound.values()))

    def _read(self, message: Received) -> Letter | None:
        """None if it is refused."""
        sender, header, array = message
        sort, has_array, step, piece, covered, _ = HEADER.unpack(header)
        try:
            letter = Letter(sender, Sort(sort), step, piece, covered, array if has_array else None)
        except ValueError:
            self._door.refused.count(Refusal.MALFORMED)
            return None
        if letter.sort is Sort.HELLO:
            card = self._door.trusted(array.tobytes(), sender)
            if card is None:
                return None
            self._move(card)
        return letter

    def _move(self, card: Card) -> None:
        outbound = self._wire.outbound.get(card.rank)
        if outbound is None:
            self._wire.connect(card)
        else:
            self._door.move(outbound, card)

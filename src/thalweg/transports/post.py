"""Letters between ranks, for plans that wait for nobody.

Unlike a transport's messages, letters may be lost: one to a peer that is gone, or that is so slow
that its queue is full, is dropped, so `send` never waits and what is late can't pile up. Whoever
needs more than that asks again. A peer that comes back at another address says so in its first
letter to each of its neighbours.

One poller waits for letters, for news of connections and for `wake`, and never looks in between.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import IntEnum
from threading import Lock
from time import monotonic, sleep
from typing import NamedTuple

import numpy as np
import zmq
from torch._C._distributed_c10d import Store

from thalweg.errors import PeerLost
from thalweg.transports.card import Card
from thalweg.transports.connection import Connection
from thalweg.transports.door import Door
from thalweg.transports.framing import cut, joined
from thalweg.transports.protection import Protection
from thalweg.transports.refusal import Refusal
from thalweg.transports.transport import Array

# magic, version, sort, zero, sender, addressee, room, step, piece, covered, bytes of the payload
HEADER = struct.Struct("<4sBBHIIIQIIQ")
MAGIC, VERSION = b"thlp", 3
PURPOSE = "post"
COPIED = 1 << 14  # bytes up to which a copy is cheaper
PAUSE = 0.02  # seconds between two looks for a peer's address
AT_ONCE = 64  # letters that are taken in before anything else is done


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
        self._room = zlib.crc32(room.encode())
        self._door = Door(rank, store, host, purpose=PURPOSE, queue=queue, protection=protection)
        self._inbound = self._door.inbound
        self._connections: dict[int, Connection] = {}
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._poller = zmq.Poller()
        self._poller.register(self._inbound, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
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
            self._connect(card)

    def send(self, letter: Letter) -> bool:
        """False if it was dropped."""
        connection = self._connections.get(letter.peer)
        if connection is None:
            card = self._door.find(letter.peer)
            if card is None:
                return False
            connection = self._connect(card)
        if connection.down:
            return False
        to, sort, step, piece, covered, array = letter
        payload = None if array is None else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        frames: list[bytes | memoryview] = []
        if payload is not None:
            frames += cut(payload.data, self._door.frame)
        nbytes = 0 if payload is None else payload.nbytes
        place = self.rank, to, self._room, step, piece, covered
        header = HEADER.pack(MAGIC, VERSION, sort, 0, *place, nbytes)
        try:
            for left, frame in zip(range(len(frames), -1, -1), (header, *frames), strict=True):
                flags = zmq.NOBLOCK | zmq.SNDMORE if left else zmq.NOBLOCK
                connection.socket.send(frame, flags, copy=len(frame) <= COPIED)
        except zmq.Again:
            return False
        return True

    def receive(self, seconds: float | None) -> list[Letter]:
        """What has come; waits until something has, or `wake` was called, or a connection came up
        or went down, or the time is over."""
        timeout = None if seconds is None else max(0, int(seconds * 1000))
        ready = dict(self._poller.poll(timeout))
        if self._woken in ready:
            with suppress(BlockingIOError):
                os.read(self._woken, 4096)
        for connection in self._connections.values():
            if connection.monitor in ready:
                connection.hear()
        letters: list[Letter] = []
        if self._inbound in ready:
            with suppress(zmq.Again):
                while len(letters) < AT_ONCE:
                    letter = self._read(self._inbound.recv_multipart(zmq.NOBLOCK, copy=False))
                    if letter is not None:
                        letters.append(letter)
        return letters

    def wake(self) -> None:
        """From any thread."""
        with self._closing:
            if not self._closed:
                with suppress(BlockingIOError):
                    os.write(self._waker, b"!")

    def is_down(self, peer: int) -> bool:
        connection = self._connections.get(peer)
        return connection is not None and connection.down

    def seconds_down(self, peer: int) -> float:
        connection = self._connections.get(peer)
        return 0.0 if connection is None else connection.seconds_down()

    def hello(self, peer: int) -> Letter:
        """Tells where this rank is now."""
        card = np.frombuffer(self._door.text.encode(), np.uint8)
        return Letter(peer, Sort.HELLO, 0, array=card)

    def close(self) -> None:
        """What was sent last may leave, for a moment, if somebody is there."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            for connection in self._connections.values():
                connection.close(linger=0 if connection.seconds_down() else None)
            self._door.close()
            os.close(self._woken)
            os.close(self._waker)

    def _connect(self, card: Card) -> Connection:
        connection = self._door.connect(card)
        self._connections[card.rank] = connection
        self._poller.register(connection.monitor, zmq.POLLIN)
        return connection

    def _read(self, frames: list[zmq.Frame]) -> Letter | None:
        """None if it is refused."""
        try:
            magic, version, sort, _, sender, to, room, *place, nbytes = HEADER.unpack(
                frames[0].buffer
            )
            letter = Letter(sender, Sort(sort), *place)
        except (struct.error, ValueError):
            magic, version = b"", 0
        if (magic, version) != (MAGIC, VERSION):
            self._door.refused.count(Refusal.MALFORMED)
            return None
        if not self._door.speaks_for(frames[0], sender):
            self._door.refused.count(Refusal.FORGED)
            return None
        if (to, room) != (self.rank, self._room):
            self._door.refused.count(Refusal.STALE)
            return None
        array = joined(frames[1:], nbytes) if frames[1:] or nbytes else None
        if isinstance(array, Refusal):
            self._door.refused.count(array)
            return None
        if letter.sort is Sort.HELLO and array is not None:
            card = self._door.trusted(array.tobytes(), sender)
            if card is None:
                return None
            self._move(card)
        return letter._replace(array=array)

    def _move(self, card: Card) -> None:
        if card.rank in self._connections:
            self._connections[card.rank].move_to(card)
        else:
            self._connect(card)

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
from collections.abc import Iterable
from contextlib import suppress
from enum import IntEnum
from threading import Lock
from time import monotonic, sleep
from typing import NamedTuple

import numpy as np
import zmq
from torch._C._distributed_c10d import Store

from thalweg.errors import PeerLost, RunError
from thalweg.transports.connection import Connection, listen
from thalweg.transports.line import Line
from thalweg.transports.transport import Array

HEADER = struct.Struct("<4sBBHIQII")  # magic, version, sort, zero, sender, step, piece, covered
MAGIC, VERSION = b"thlp", 1
COPIED = 1 << 14  # bytes up to which a copy is cheaper
PAUSE = 0.02  # seconds between two looks for a peer's address
AT_ONCE = 64  # letters that are taken in before anything else is done


class Sort(IntEnum):
    """What a letter is."""

    HELLO = 0  # "I am back, at this address"
    ANSWER = 1  # a child's sum
    RESULT = 2  # from above
    FOLLOW = 3  # "send me results, from this step on": the sender's parent is gone
    HURRY = 4  # from above: "send what you have"
    PARTIAL = 5  # what a child had
    ASK = 6  # "send me your state"
    STATE = 7  # here it is; or, without one, "I need one myself"
    LEAVE = 8  # "my parent is back"


class Letter(NamedTuple):
    """`covered` is how many cells of the data are in it; 0: all that belong there."""

    peer: int  # who sent it, or is to get it
    sort: Sort
    step: int
    piece: int = 0
    covered: int = 0
    array: Array | None = None


class Post:
    """`queue` is how many letters may wait for one peer."""

    def __init__(self, rank: int, store: Store, host: str = "127.0.0.1", queue: int = 64) -> None:
        self.rank = rank
        self._line = Line(store, rank)
        self._queue = queue
        self._context = zmq.Context(io_threads=1)
        self._inbound, self.endpoint = listen(self._context, rank, host, queue)
        store.set(_key(rank), self.endpoint)
        self._connections: dict[int, Connection] = {}
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._poller = zmq.Poller()
        self._poller.register(self._inbound, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self._closing = Lock()
        self._closed = False

    def meet(self, peers: Iterable[int], deadline: float) -> None:
        """Connect to these; PeerLost if one has no address by the deadline."""
        for peer in peers:
            while (endpoint := self._endpoint(peer)) is None:
                if monotonic() >= deadline:
                    raise PeerLost(f"rank {peer} hasn't come", "is it running, with the same plan?")
                sleep(PAUSE)
            self._connect(peer, endpoint)

    def send(self, letter: Letter) -> bool:
        """False if it was dropped."""
        connection = self._connections.get(letter.peer)
        if connection is None:
            endpoint = self._endpoint(letter.peer)
            if endpoint is None:
                return False
            connection = self._connect(letter.peer, endpoint)
        if connection.down:
            return False
        _, sort, step, piece, covered, array = letter
        header = HEADER.pack(MAGIC, VERSION, sort, 0, self.rank, step, piece, covered)
        try:
            if array is None:
                connection.socket.send(header, zmq.NOBLOCK)
            else:
                connection.socket.send(header, zmq.NOBLOCK | zmq.SNDMORE)
                payload = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                connection.socket.send(payload, zmq.NOBLOCK, copy=payload.nbytes <= COPIED)
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
        address = np.frombuffer(self.endpoint.encode(), np.uint8)
        return Letter(peer, Sort.HELLO, 0, array=address)

    def close(self) -> None:
        """What was sent last may leave, for a moment, if somebody is there."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._inbound.close(linger=0)
            for connection in self._connections.values():
                connection.close(linger=0 if connection.seconds_down() else None)
            self._context.term()
            os.close(self._woken)
            os.close(self._waker)

    def _connect(self, peer: int, endpoint: str) -> Connection:
        connection = Connection(self._context, peer, endpoint, queue=self._queue)
        self._connections[peer] = connection
        self._poller.register(connection.monitor, zmq.POLLIN)
        return connection

    def _endpoint(self, peer: int) -> str | None:
        with suppress(RunError):  # the store is gone
            if self._line.ask(lambda store: store.check([_key(peer)])):
                return self._line.ask(lambda store: store.get(_key(peer))).decode()
        return None

    def _read(self, frames: list[zmq.Frame]) -> Letter | None:
        """None if it isn't from one of us, or only says where its sender is."""
        try:
            magic, version, sort, _, sender, step, piece, covered = HEADER.unpack(frames[0].buffer)
            if (magic, version) != (MAGIC, VERSION):
                return None
            array = np.frombuffer(frames[1].buffer, np.uint8) if len(frames) == 2 else None
            letter = Letter(sender, Sort(sort), step, piece, covered, array)
        except (struct.error, ValueError):
            return None
        if letter.sort is Sort.HELLO and array is not None:
            self._move(sender, array.tobytes().decode(errors="replace"))
        return letter

    def _move(self, peer: int, endpoint: str) -> None:
        if not endpoint.startswith("tcp://"):
            return
        if peer in self._connections:
            self._connections[peer].move_to(endpoint)
        else:
            self._connect(peer, endpoint)


def _key(rank: int) -> str:
    return f"post/{rank}"

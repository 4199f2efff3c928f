"""Who is let in: ZeroMQ asks (RFC 27, ZAP) before a connection under CURVE may say anything.

A public key gets in if its card is in the store, sealed; the connection's messages then carry the
card's rank (`User-Id`). Keys that are known get in at once. Others are looked up, a bounded number
a second, those from different addresses in turn: strangers can neither flood the store nor keep a
worker out that was started again. A key that has no card is refused. If the store doesn't answer,
neither does the gate, and ZeroMQ tries again later.

Not `zmq.auth`: that answers one request after the other, and all would wait for the store.

The same thread hears the news of the listening socket, which tell how many were turned away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import NamedTuple
from uuid import uuid4

import zmq
from zmq.utils.monitor import parse_monitor_message

from thalweg.errors import RunError
from thalweg.transports.card import KEY_NBYTES, Card
from thalweg.transports.refusal import Refusal, Tally

ZAP = "inproc://zeromq.zap.01"
VERSION, DOMAIN, MECHANISM = b"1.0", b"thalweg", b"CURVE"
FRAMES = 9  # of a request that names a key, envelope included
HANDSHAKE = 5.0  # seconds for a connection to say who it is
ADDRESSES, FROM_ONE = 256, 256  # that are waited for at once; and requests from each of them
BURST, A_SECOND = 256, 500  # keys that are looked up
AT_ONCE = 32  # of them, in one call
GLANCE = 2  # milliseconds between two looks whether the store has answered
REST = 0.2  # seconds after it hasn't
Context = zmq.Context[zmq.Socket[bytes]]
LookUp = Callable[[list[bytes]], "Future[list[Card | None]]"]
"""The cards of these public keys; raises RunError, or the future does, if the store is gone."""
_FAILED: dict[int, Refusal] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Refusal.STRANGER,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: Refusal.UNFINISHED,
}
# Never EVENT_HANDSHAKE_FAILED_PROTOCOL. ZeroMQ 4.3.5 tells it before it looks at errno to see what
# went wrong, and telling overwrites that: it then doesn't close the connection, but reads no more
# of it. With a frame that doesn't authenticate, nobody would ever hear that it was lost.
NEWS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class _Request(NamedTuple):
    envelope: list[bytes]  # routing id, delimiter, version, number
    key: bytes
    since: float


class Gate:
    """Of one context. Made before its socket listens, so that nobody slips in; opened afterwards;
    ends with its context."""

    def __init__(self, context: Context, tally: Tally, look_up: LookUp, *, curve: bool) -> None:
        self._tally = tally
        self._look_up = look_up
        self._known: dict[bytes, int] = {}
        self._waiting: dict[bytes, deque[_Request]] = {}  # by address
        self._asked: tuple[list[_Request], Future[list[Card | None]]] | None = None
        self._asked_at = 0.0
        self._tokens, self._counted = float(BURST), monotonic()
        self._rests_until = 0.0
        self._accepted: dict[int, int] = {}  # by descriptor: how many had succeeded before
        self._succeeded = 0
        self._failed = False  # the last news
        self._poller = zmq.Poller()
        self._requests: zmq.Socket[bytes] | None = None
        if curve:
            self._requests = context.socket(zmq.ROUTER)
            self._requests.setsockopt(zmq.LINGER, 0)
            self._requests.bind(ZAP)
            self._poller.register(self._requests, zmq.POLLIN)
        self._news = context.socket(zmq.PAIR)
        self._news.setsockopt(zmq.RCVHWM, 0)  # a full one would block ZeroMQ's thread
        self._news.setsockopt(zmq.LINGER, 0)
        self._poller.register(self._news, zmq.POLLIN)

    def watch(self, inbound: zmq.Socket[bytes]) -> None:
        """Before it listens."""
        news = f"inproc://from-all-{uuid4()}"
        inbound.monitor(news, NEWS)
        self._news.connect(news)

    def open(self) -> None:
        Thread(target=self._work, name="thalweg-gate", daemon=True).start()

    def know(self, card: Card) -> None:
        """Let this one in without asking the store."""
        if card.key:
            self._known[card.key] = card.rank

    def _work(self) -> None:
        with suppress(zmq.ZMQError):  # the context has ended
            while True:
                ready = dict(self._poller.poll(self._milliseconds()))
                if self._news in ready:
                    self._hear()
                if self._requests in ready:
                    self._receive()
                self._take_answers()
                self._ask()
        for socket in (self._requests, self._news):
            if socket is not None:
                socket.close(linger=0)

    def _milliseconds(self) -> int | None:
        """How long nothing but ZeroMQ can have anything to say."""
        if self._asked is not None:
            return GLANCE
        if self._waiting:
            wanted = max(self._rests_until - monotonic(), (1 - self._refill()) / A_SECOND, 0.0)
            return 1 + int(1000 * wanted)
        return None

    # Who wants to come in

    def _receive(self) -> None:
        assert self._requests is not None
        with suppress(zmq.Again):
            for _ in range(FROM_ONE):
                frames = self._requests.recv_multipart(zmq.NOBLOCK)
                envelope, address, key = frames[:4], b"".join(frames[5:6]), frames[-1]
                known = len(frames) == FRAMES and frames[7] == MECHANISM
                if not known or len(key) != KEY_NBYTES:
                    self._answer(envelope, None)
                elif key in self._known:
                    self._answer(envelope, self._known[key])
                elif address in self._waiting or len(self._waiting) < ADDRESSES:
                    queue = self._waiting.setdefault(address, deque(maxlen=FROM_ONE))
                    queue.append(_Request(envelope, key, monotonic()))

    def _answer(self, envelope: list[bytes], rank: int | None) -> None:
        assert self._requests is not None
        code, user = (b"400", b"") if rank is None else (b"200", b"%d" % rank)
        with suppress(zmq.Again):
            self._requests.send_multipart([*envelope, code, b"", user, b""], zmq.NOBLOCK)

    def _refill(self) -> float:
        now = monotonic()
        self._tokens = min(BURST, self._tokens + A_SECOND * (now - self._counted))
        self._counted = now
        return self._tokens

    def _ask(self) -> None:
        """The store, of the next few."""
        if self._asked is not None or not self._waiting or monotonic() < self._rests_until:
            return
        due = self._next(int(min(AT_ONCE, self._refill())))
        if not due:
            return
        self._tokens -= len(due)
        try:
            self._asked = due, self._look_up([request.key for request in due])
            self._asked_at = monotonic()
        except RunError:
            self._rests_until = monotonic() + REST

    def _next(self, number: int) -> list[_Request]:
        """From every address one, and so on; those that ZeroMQ has given up are left out."""
        found: list[_Request] = []
        oldest = monotonic() - HANDSHAKE
        while self._waiting and len(found) < number:
            address, queue = next(iter(self._waiting.items()))
            request = queue.popleft()
            del self._waiting[address]
            if queue:
                self._waiting[address] = queue  # at the end
            if request.since > oldest:
                found.append(request)
        return found

    def _take_answers(self) -> None:
        if self._asked is None:
            return
        if not self._asked[1].done():
            if monotonic() - self._asked_at > HANDSHAKE:
                self._asked = None
            return
        (requests, answer), self._asked = self._asked, None
        try:
            cards = answer.result()
        except (RunError, RuntimeError):  # torch's DistError is one
            self._rests_until = monotonic() + REST
            return
        for request, card in zip(requests, cards, strict=True):
            if card is not None:
                self.know(card)
            self._answer(request.envelope, None if card is None else card.rank)

    # Who was turned away

    def _hear(self) -> None:
        """ZeroMQ says nothing of some that it turns away, but to close their connection: they are
        known by it that nobody's handshake succeeded since they came."""
        with suppress(zmq.Again):
            while True:
                news = parse_monitor_message(self._news.recv_multipart(zmq.NOBLOCK))
                event, number = news["event"], int(news["value"])
                if event == zmq.EVENT_ACCEPTED:
                    self._accepted[number] = self._succeeded
                elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._succeeded += 1
                elif event in _FAILED:
                    self._tally.count(_FAILED[event])
                elif event == zmq.EVENT_DISCONNECTED:
                    before = self._accepted.pop(number, -1)
                    if before == self._succeeded and not self._failed:
                        self._tally.count(Refusal.STRANGER)
                self._failed = event in _FAILED

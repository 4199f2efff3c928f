"""ZeroMQ's ends: where a rank listens, and its connections to others, if anybody is there.

ZeroMQ reconnects by itself and says nothing of it, but its monitor does. A connection that broke or
was refused, or whose packets aren't acknowledged for a while, is down until a handshake succeeds.
A slow link isn't: bytes that arrive are acknowledged, however few they are. After some refusals
ZeroMQ gives up, and says nothing of that either: it doesn't try again. Then it is told to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from uuid import uuid4

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from thalweg.errors import TransportError
from thalweg.transports.card import Card
from thalweg.transports.framing import OVERHEAD
from thalweg.transports.gate import DOMAIN, HANDSHAKE

QUEUE = 256  # messages to or from one peer
LINGER = 2000  # milliseconds for what was sent last to leave
NO_ANSWER = 3000  # milliseconds for the other end's kernel to say that something came
IDLE = 5  # seconds after which it is asked whether it is there
AGAIN = 0.2  # seconds after which a connection that ZeroMQ gave up is tried again
TRIES = zmq.EVENT_CONNECT_RETRIED
DOWN = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | TRIES  # see gate.NEWS
UP = zmq.EVENT_HANDSHAKE_SUCCEEDED


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Keys:
    """A pair for CURVE."""

    public: bytes
    private: bytes

    @classmethod
    def fresh(cls) -> Keys:
        public, private = zmq.curve_keypair()
        return cls(public=z85.decode(public), private=z85.decode(private))

    def put_on(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.private)


def _bracketed(host: str) -> str:
    """As an endpoint has it."""
    return f"[{host}]" if ":" in host else host


def listen(
    context: zmq.Context[zmq.Socket[bytes]],
    rank: int,
    host: str,
    queue: int,
    frame: int,
    keys: Keys | None,
    before: Callable[[zmq.Socket[bytes]], None],
) -> tuple[zmq.Socket[bytes], str]:
    """A socket for whatever comes, and its endpoint; `context` is gone if it can't be had. No
    frame may be longer than `frame` bytes. `before` is called with the socket before it listens."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, queue)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.MAXMSGSIZE, frame + OVERHEAD)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE))
    if keys is not None:
        keys.put_on(socket)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    before(socket)
    try:
        port = socket.bind_to_random_port(f"tcp://{_bracketed(host)}")
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise TransportError(
            f"rank {rank} can't listen on {host}: {error}", "name another address"
        ) from None
    return socket, f"tcp://{_bracketed(host)}:{port}"


class Connection:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        card: Card,
        queue: int = QUEUE,
        keys: Keys | None = None,
    ) -> None:
        self.socket = context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, queue)
        self.socket.setsockopt(zmq.LINGER, LINGER)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, NO_ANSWER)
        self.socket.setsockopt(zmq.TCP_MAXRT, NO_ANSWER)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, IDLE)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE))
        if keys is not None:
            keys.put_on(self.socket)
        self.monitor = context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.RCVHWM, 0)  # a full one would block ZeroMQ's thread
        news = f"inproc://to-{uuid4()}"  # the name of one that closes isn't free at once
        self.socket.monitor(news, DOWN | UP)
        self.monitor.connect(news)
        self._card = card
        self._left: set[str] = set()  # where the peer isn't any more
        self.broke = False  # once it had stood: what was on its way is lost, though it may be back
        self._was_up = False
        self._down_since: float | None = None
        self._given_up: float | None = None  # since when ZeroMQ hasn't tried again
        self._open()

    @property
    def down(self) -> bool:
        """By the news that were heard."""
        return self._down_since is not None

    def seconds_down(self) -> float:
        """For how long; 0 while it is up, or was never tried."""
        self.hear()
        if self._given_up is not None and monotonic() - self._given_up > AGAIN:
            self._close_endpoint()
            self._open()
        return 0.0 if self._down_since is None else monotonic() - self._down_since

    def hear(self) -> None:
        """Take in the news of the monitor."""
        while self._has_news():
            news = parse_monitor_message(self.monitor.recv_multipart())
            if news["endpoint"].decode() in self._left:  # late news of where the peer was before
                continue
            if news["event"] == UP:
                self._down_since = self._given_up = None
                self._was_up = True
                continue
            self.broke = self.broke or self._was_up
            self._given_up = None if news["event"] == TRIES else monotonic()
            if self._down_since is None:
                self._down_since = monotonic()

    def move_to(self, card: Card) -> bool:
        """Connect there instead, if that is elsewhere. What waits for the old one is dropped."""
        if card == self._card:
            return False
        self._close_endpoint()
        self._left.add(self._card.endpoint)
        self._left.discard(card.endpoint)
        self._card = card
        self._down_since = None
        self._open()
        return True

    def close(self, linger: int | None = None) -> None:
        """What was sent last may leave, for a moment, or so many milliseconds."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger)

    def _open(self) -> None:
        self._given_up = None
        self.socket.setsockopt(zmq.IPV6, int("[" in self._card.endpoint))
        if self._card.key:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, self._card.key)
        self.socket.connect(self._card.endpoint)

    def _close_endpoint(self) -> None:
        with suppress(zmq.ZMQError):  # ZeroMQ has given it up
            self.socket.disconnect(self._card.endpoint)

    def _has_news(self) -> bool:
        return bool(int(self.monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

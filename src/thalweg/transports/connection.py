"""ZeroMQ's ends: where a rank listens, and its connections to others, if anybody is there.

ZeroMQ reconnects by itself and says nothing of it, but its monitor does. A connection that broke or
was refused is down until a handshake succeeds; one that gets no answer at all is not: its packets
may be lost, and deadlines are for that.
"""

from __future__ import annotations

from time import monotonic

import zmq
from zmq.utils.monitor import parse_monitor_message

from thalweg.errors import TransportError

QUEUE = 256  # messages to or from one peer
LINGER = 2000  # milliseconds for what was sent last to leave
DOWN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
UP = zmq.EVENT_HANDSHAKE_SUCCEEDED


def _bracketed(host: str) -> str:
    """As an endpoint has it."""
    return f"[{host}]" if ":" in host else host


def listen(
    context: zmq.Context[zmq.Socket[bytes]], rank: int, host: str, queue: int = QUEUE
) -> tuple[zmq.Socket[bytes], str]:
    """A socket for whatever comes, and its endpoint; `context` is gone if it can't be had."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, queue)
    socket.setsockopt(zmq.IPV6, int(":" in host))
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
        peer: int,
        endpoint: str,
        queue: int = QUEUE,
    ) -> None:
        self.socket = context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, queue)
        self.socket.setsockopt(zmq.LINGER, LINGER)
        self.monitor = context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.RCVHWM, 0)  # a full one would block ZeroMQ's thread
        self.socket.monitor(f"inproc://to-{peer}", DOWN | UP)
        self.monitor.connect(f"inproc://to-{peer}")
        self._endpoint = endpoint
        self._left: set[str] = set()  # where the peer isn't any more
        self._down_since: float | None = None
        self._open()

    @property
    def down(self) -> bool:
        """By the news that were heard."""
        return self._down_since is not None

    def seconds_down(self) -> float:
        """For how long; 0 while it is up, or was never tried."""
        self.hear()
        return 0.0 if self._down_since is None else monotonic() - self._down_since

    def hear(self) -> None:
        """Take in the news of the monitor."""
        while self._has_news():
            news = parse_monitor_message(self.monitor.recv_multipart())
            if news["endpoint"].decode() in self._left:  # late news of where the peer was before
                continue
            if news["event"] == UP:
                self._down_since = None
            elif self._down_since is None:
                self._down_since = monotonic()

    def move_to(self, endpoint: str) -> bool:
        """Connect there instead, if that is elsewhere. What waits for the old one is dropped."""
        if endpoint == self._endpoint:
            return False
        self.socket.disconnect(self._endpoint)
        self._left.add(self._endpoint)
        self._left.discard(endpoint)
        self._endpoint = endpoint
        self._down_since = None
        self._open()
        return True

    def close(self, linger: int | None = None) -> None:
        """What was sent last may leave, for a moment, or so many milliseconds."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger)

    def _open(self) -> None:
        self.socket.setsockopt(zmq.IPV6, int("[" in self._endpoint))
        self.socket.connect(self._endpoint)

    def _has_news(self) -> bool:
        return bool(int(self.monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

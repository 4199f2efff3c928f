"""An outbound ZeroMQ connection, and whether anybody is at its other end.

ZeroMQ reconnects by itself and says nothing of it, but its monitor does. A connection that broke or
was refused is down until a handshake succeeds; one that gets no answer at all is not: its packets
may be lost, and deadlines are for that.
"""

from __future__ import annotations

from time import monotonic

import zmq
from zmq.utils.monitor import parse_monitor_message

QUEUE = 256  # messages to or from one peer
LINGER = 2000  # milliseconds for what was sent last to leave
DOWN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
UP = zmq.EVENT_HANDSHAKE_SUCCEEDED


class Connection:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], peer: int, endpoint: str) -> None:
        self.socket = context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, QUEUE)
        self.socket.setsockopt(zmq.LINGER, LINGER)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a full one would block ZeroMQ's thread
        self.socket.monitor(f"inproc://to-{peer}", DOWN | UP)
        self._monitor.connect(f"inproc://to-{peer}")
        self._endpoint = endpoint
        self._down_since: float | None = None
        self._open()

    def seconds_down(self) -> float:
        """For how long; 0 while it is up, or was never tried."""
        while self._has_news():
            news = parse_monitor_message(self._monitor.recv_multipart())
            if news["event"] == UP:
                self._down_since = None
            elif self._down_since is None:
                self._down_since = monotonic()
        return 0.0 if self._down_since is None else monotonic() - self._down_since

    def move_to(self, endpoint: str) -> bool:
        """Connect there instead, if that is elsewhere. What waits for the old one is dropped."""
        if endpoint == self._endpoint:
            return False
        self.socket.disconnect(self._endpoint)
        self._endpoint = endpoint
        self._down_since = None
        self._open()
        return True

    def close(self) -> None:
        """What was sent last may leave, for a moment."""
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close()

    def _open(self) -> None:
        self.socket.setsockopt(zmq.IPV6, int("[" in self._endpoint))
        self.socket.connect(self._endpoint)

    def _has_news(self) -> bool:
        return bool(int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

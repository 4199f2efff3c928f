"""Those who should not get in, and what they try. All of it goes to 127.0.0.1."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep

import zmq

Frames = Sequence[bytes]
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
LONG = 700  # bytes: longer than what handshakes are made of
KEPT = 64  # connections that a stranger holds at once


def greeting(mechanism: bytes) -> bytes:
    """With which a ZMTP 3.1 client begins."""
    return GREETING + mechanism.ljust(20, b"\0") + bytes(32)


GARBAGE = (
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 4,
    b"\xff" * 5000,
    bytes(5000),
    greeting(b"NULL"),
    greeting(b"PLAIN") + b"\x04\x10\x05HELLO\x01u\x01p",
    greeting(b"CURVE"),
    greeting(b"CURVE") + b"\x04\x05\x05HELLO",
    greeting(b"CURVE") + b"\x04\xc8\x05HELLO" + os.urandom(194),
    greeting(b"CURVE") + b"\x06" + (1 << 40).to_bytes(8, "big") + bytes(2000),  # so long a frame
    greeting(b"CURVE") + b"\x02" + (1 << 62).to_bytes(8, "big") + bytes(2000),
    greeting(b"NULL") + b"\x00\x05hello",
)


def port_of(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def throw(endpoint: str, number: int, pieces: Sequence[bytes] = GARBAGE, seed: int = 0) -> None:
    """So many raw connections, each with a piece of garbage; some stay open for a while."""
    draw = random.Random(seed)
    open_ones: list[socket.socket] = []
    try:
        for count in range(number):
            piece = pieces[count % len(pieces)]
            if draw.random() < 0.2:
                piece = bytes(b ^ (1 << draw.randrange(8)) for b in piece)
            with suppress(OSError):
                connection = socket.create_connection(port_of(endpoint), timeout=5)
                open_ones.append(connection)
                connection.sendall(piece)
            while len(open_ones) > KEPT:
                open_ones.pop(0).close()
    finally:
        for connection in open_ones:
            connection.close()


@contextmanager
def pushing(
    endpoint: str,
    *,
    server: bytes | None = None,
    keys: tuple[bytes, bytes] | None = None,
) -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ socket of a stranger's: plain, or under CURVE with keys, its own if not given."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.LINGER, 0)
    push.setsockopt(zmq.RECONNECT_IVL, 20)
    if server is not None:
        public, private = keys or zmq.curve_keypair()
        push.setsockopt(zmq.CURVE_SERVERKEY, server)
        push.setsockopt(zmq.CURVE_PUBLICKEY, public)
        push.setsockopt(zmq.CURVE_SECRETKEY, private)
    push.connect(endpoint)
    try:
        yield push
    finally:
        push.close(linger=0)
        context.term()


class Eavesdropper:
    """Between a client and a server, on a port of its own: passes everything on, and keeps what the
    client said, one recording a connection. With `meddles` it changes a byte of each longer piece
    that the client says."""

    def __init__(self, endpoint: str) -> None:
        self._target = port_of(endpoint)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.recordings: list[bytearray] = []
        self.meddles = False
        self._open: list[socket.socket] = [self._listener]
        self._start(self._accept)

    def replay(self, number: int, seconds: float = 0.0) -> None:
        """What was recorded, to the server, so many times."""
        for count in range(number):
            recording = bytes(self.recordings[count % len(self.recordings)])
            with suppress(OSError), socket.create_connection(self._target, timeout=5) as again:
                again.sendall(recording)
                sleep(seconds)

    def close(self) -> None:
        for connection in self._open:
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target, timeout=5)
                server.settimeout(None)
                self._open += [client, server]
                self.recordings.append(bytearray())
                keep = self.recordings[-1].extend
                self._start(lambda c=client, s=server, k=keep: self._pass_on(c, s, k))
                self._start(lambda c=client, s=server: self._pass_on(s, c, lambda data: None))

    def _pass_on(
        self, source: socket.socket, target: socket.socket, keep: Callable[[bytes], None]
    ) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                keep(data)
                if self.meddles and len(data) > LONG:
                    data = data[:LONG] + bytes([data[LONG] ^ 1]) + data[LONG + 1 :]
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, daemon=True).start()


def attack(endpoint: str, server: bytes, number: int, recordings: Sequence[bytes]) -> int:
    """About so many connections and messages of all kinds; how many there were."""
    some = number // 4
    throw(endpoint, some)
    throw(endpoint, some, recordings, seed=1)
    tried = 2 * some
    while tried < number:
        keys = [None, server, os.urandom(32)][tried // 10 % 3]  # plain, its own, a wrong server's
        with pushing(endpoint, server=keys) as stranger:
            for _ in range(10):  # messages that wait for a handshake which never succeeds
                with suppress(zmq.Again):
                    stranger.send_multipart([os.urandom(60), os.urandom(500)], zmq.NOBLOCK)
            sleep(0.003)
        tried += 10
    return tried


def main(endpoint: str, key: str, number: str, recording: str) -> None:
    print(attack(endpoint, bytes.fromhex(key), int(number), [Path(recording).read_bytes()]))


if __name__ == "__main__":
    main(*sys.argv[1:])

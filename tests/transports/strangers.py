"""Those who should not get in, and what they try. All of it goes to 127.0.0.1."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from thalweg.transports import tcp
from thalweg.transports.cipher import RECORD_NBYTES, TAG_NBYTES, RecordCipher
from thalweg.transports.handshake import (
    HELLO_NBYTES,
    REPLY_NBYTES,
    WIRE_MAGIC,
    WIRE_PREFIX_STRUCT,
    WIRE_VERSION,
    Hello,
    Identity,
    answered,
    scope_of,
    sender_of,
)
from thalweg.transports.peer_record import PeerRecord, RecordSigner

KEPT = 64  # connections that a stranger holds at once
PATIENCE = 10.0  # seconds for an answer
NOWHERE = "tcp://127.0.0.1:9"

GARBAGE = (
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 4,
    b"\xff" * 5000,
    bytes(5000),
    WIRE_MAGIC,
    WIRE_PREFIX_STRUCT.pack(WIRE_MAGIC, WIRE_VERSION, 0),
    WIRE_PREFIX_STRUCT.pack(WIRE_MAGIC, WIRE_VERSION, 1) + b"x",
    WIRE_PREFIX_STRUCT.pack(WIRE_MAGIC, WIRE_VERSION, 65535) + bytes(70_000),
    WIRE_PREFIX_STRUCT.pack(WIRE_MAGIC, WIRE_VERSION, HELLO_NBYTES) + os.urandom(HELLO_NBYTES // 2),
    WIRE_PREFIX_STRUCT.pack(WIRE_MAGIC, WIRE_VERSION, HELLO_NBYTES) + os.urandom(HELLO_NBYTES),
    WIRE_PREFIX_STRUCT.pack(WIRE_MAGIC, WIRE_VERSION + 1, 200) + os.urandom(200),
    WIRE_PREFIX_STRUCT.pack(b"wlht", WIRE_VERSION, 200) + os.urandom(200),
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


def strange_identity(
    rank: int,
    *,
    secret: bytes | None = None,
    encrypted: bool = True,
    purpose: str = tcp.TCP_PURPOSE,
    room: str = "",
    record: PeerRecord | None = None,
) -> Identity:
    """With keys of its own; the card shows them, unless it is given."""
    private = X25519PrivateKey.generate() if encrypted else None
    public = private.public_key().public_bytes_raw() if private else b""
    return Identity(
        record=record or PeerRecord(rank=rank, endpoint=NOWHERE, key=public),
        private=private,
        signer=RecordSigner(purpose=purpose, run="", secret=secret, encrypted=encrypted),
        scope=scope_of(purpose, "", room),
    )


def exactly(source: socket.socket, nbytes: int) -> bytes:
    """So many bytes; OSError if they don't come."""
    came = bytearray()
    while len(came) < nbytes:
        piece = source.recv(nbytes - len(came))
        if not piece:
            raise ConnectionResetError
        came += piece
    return bytes(came)


def records_of(cipher: RecordCipher | None, header: bytes, payload: bytes) -> list[bytes]:
    """A message as it goes over a connection; the header is in the first record."""
    if cipher is None:
        return [header + payload]
    records = []
    for at in range(0, max(1, len(payload)), RECORD_NBYTES):
        plain, said = payload[at : at + RECORD_NBYTES], b"" if at else header
        out = bytearray(len(plain) + TAG_NBYTES)
        cipher.seal(memoryview(plain), said, memoryview(out))
        records.append(said + bytes(out))
    return records


class Caller:
    """One who connects to an endpoint, and has been let in if it was answered."""

    def __init__(self, identity: Identity, peer: PeerRecord) -> None:
        self.socket = socket.create_connection(port_of(peer.endpoint), timeout=PATIENCE)
        hello = Hello(identity, peer)
        self.cipher: RecordCipher | None = None
        self.let_in = False
        with suppress(OSError):
            self.socket.sendall(hello.text)
            self.cipher = hello.finish(exactly(self.socket, REPLY_NBYTES))
            self.let_in = True

    def say(self, header: bytes, payload: bytes) -> None:
        with suppress(OSError):
            self.socket.sendall(b"".join(records_of(self.cipher, header, payload)))

    def is_dropped(self) -> bool:
        """Waits until the other side hangs up; an endpoint says nothing after its answer."""
        try:
            return not self.socket.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True


@contextmanager
def calling(identity: Identity, peer: PeerRecord) -> Iterator[Caller]:
    caller = Caller(identity, peer)
    try:
        yield caller
    finally:
        caller.socket.close()


class Receiver:
    """One that listens as this rank, plain, and answers one connection at a time."""

    def __init__(self, rank: int, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.settimeout(PATIENCE)
        self.port = self._listener.getsockname()[1]
        self.record = PeerRecord(rank=rank, endpoint=f"tcp://127.0.0.1:{self.port}", key=b"")
        self._identity = strange_identity(rank, encrypted=False, record=self.record)
        self._accepted: socket.socket | None = None

    def message(self) -> tuple[bytes, bytes]:
        """The next one: header and payload."""
        if self._accepted is None:
            self._accepted, _ = self._listener.accept()
            self._accepted.settimeout(PATIENCE)
            hello = hello_of(self._accepted)
            sender = sender_of(self._identity, hello)
            assert sender is not None
            self._accepted.sendall(answered(self._identity, hello, sender)[0])
        header = exactly(self._accepted, tcp.TCP_HEADER_STRUCT.size)
        return header, exactly(self._accepted, tcp.TCP_HEADER_STRUCT.unpack(header)[-1])

    def close(self) -> None:
        self._listener.close()
        if self._accepted is not None:
            self._accepted.close()


def hello_of(source: socket.socket) -> bytes:
    prefix = exactly(source, WIRE_PREFIX_STRUCT.size)
    return prefix + exactly(source, WIRE_PREFIX_STRUCT.unpack(prefix)[2])


class Eavesdropper:
    """Between a client and a server, on a port of its own: passes everything on, and keeps what the
    client said, one recording a connection."""

    def __init__(self, endpoint: str, port: int = 0) -> None:
        self._target = port_of(endpoint)
        self._listener = socket.create_server(("127.0.0.1", port))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.recordings: list[bytearray] = []
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

    def pieces(self, client: socket.socket) -> Iterable[bytes]:
        """What the server is given of what the client says."""
        while data := client.recv(1 << 16):
            yield data

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target, timeout=5)
                server.settimeout(None)
                self._open += [client, server]
                self.recordings.append(bytearray())
                recording = self.recordings[-1]
                self._start(lambda c=client, s=server, r=recording: self._there(c, s, r))
                self._start(lambda c=client, s=server: self._back(c, s))

    def _there(self, client: socket.socket, server: socket.socket, recording: bytearray) -> None:
        with suppress(OSError):
            for data in self.pieces(client):
                recording += data
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _back(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, daemon=True).start()


Meddle = Callable[[int, bytes], Iterable[bytes]]
"""What becomes of a record, by its number in its message; OSError ends the connection there."""


def leave_alone(number: int, record: bytes) -> Iterable[bytes]:
    return (record,)


class Meddler(Eavesdropper):
    """One that knows where records begin and end, though not what is in them."""

    meddle: Meddle = staticmethod(leave_alone)

    def pieces(self, client: socket.socket) -> Iterable[bytes]:
        yield hello_of(client)
        while True:
            header = exactly(client, tcp.TCP_HEADER_STRUCT.size)
            left = tcp.TCP_HEADER_STRUCT.unpack(header)[-1]
            number, said = 0, header
            while not number or left:
                nbytes = min(left, RECORD_NBYTES)
                yield from self.meddle(number, said + exactly(client, nbytes + TAG_NBYTES))
                left -= nbytes
                number, said = number + 1, b""


def attack(endpoint: str, key: bytes, rank: int, number: int, recordings: Sequence[bytes]) -> int:
    """About so many connections and messages of all kinds; how many there were."""
    some = number // 4
    throw(endpoint, some)
    throw(endpoint, some, recordings, seed=1)
    for tried in range(2 * some, number):
        kind = tried % 3  # plain, with keys of its own, and for a wrong server's key
        peer = PeerRecord(rank=rank, endpoint=endpoint, key=key if kind < 2 else os.urandom(32))
        with suppress(OSError), calling(strange_identity(0, encrypted=kind > 0), peer) as stranger:
            stranger.say(os.urandom(tcp.TCP_HEADER_STRUCT.size), os.urandom(500))
    return number


def main(endpoint: str, key: str, rank: str, number: str, recording: str) -> None:
    recordings = [Path(recording).read_bytes()]
    print(attack(endpoint, bytes.fromhex(key), int(rank), int(number), recordings))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The two ends of a TCP connection, which carries messages from one rank to another.

A message is a header of fixed length, whose last eight bytes are the length of the payload, and the
payload. On an encrypted connection the payload is cut into records (`cipher`); the header travels
in the clear and is authenticated with the first record.

Sending: the thread that sends writes to the socket itself. Messages that the socket doesn't accept
at once wait in a bounded queue, and the network thread (`endpoint`) writes them as soon as it does.
Receiving: small messages are parsed from a buffer, many at a time. The payload of a large one is
read, or decrypted, straight into the array that is delivered.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import NamedTuple

import numpy as np

from thalweg.transports.cipher import RECORD_NBYTES, TAG_NBYTES, RecordCipher
from thalweg.transports.peer_record import PeerRecord
from thalweg.transports.rejections import RejectionReason
from thalweg.transports.transport import Add, Array, Landing

KEEPALIVE_IDLE_SECONDS = 5  # before the kernel probes whether the peer is alive
CIPHERTEXT_STAGE_BYTES = 4 * (RECORD_NBYTES + TAG_NBYTES)  # encrypted before they are sent
READ_BUFFER_BYTES = 1 << 16  # where payloads need not be decrypted
MIN_DIRECT_READ_BYTES = 1 << 14  # missing bytes of a payload that are read straight into place
WRITE_CHUNK_BYTES = 1 << 20  # per system call: more of them stall TCP on fast links
MAX_BUFFERS_PER_SEND = 64  # per system call
MAX_BYTES_PER_TURN = 1 << 18  # read from one connection before the others
PAYLOAD_LENGTH_BYTES = 8  # at the end of a header
ELEMENT_ALIGNMENT_BYTES = 16  # a whole number of elements of every type
EMPTY_ARRAY = np.empty(0, np.uint8)
EMPTY_MEMORY = memoryview(bytearray())


class RejectedMessage(Exception):
    """A message on a connection is not what the peer sent, or cannot be received."""

    def __init__(self, why: RejectionReason) -> None:
        super().__init__(why.value)
        self.why = why


def prepare(connection: socket.socket) -> None:
    """Set the socket options of both ends: no delays, and detection of a dead peer."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(slots=True, eq=False)
class Outgoing:
    """A submitted message, whose payload may be changed once it is `done`."""

    header: bytes
    payload: memoryview
    at: int = 0  # bytes of the payload that were encrypted
    done: bool = False


class Outbound:
    """A connection to a peer, used by the thread that sends and by the network thread."""

    def __init__(self, record: PeerRecord) -> None:
        self.peer_record = record
        self.lock = Lock()
        self.socket: socket.socket | None = None  # None while it is down
        self.queue: deque[Outgoing] = deque()
        self.closed = False  # for good
        self.has_broken = False  # after it was up: messages in flight are lost even if it is back
        self.awaited = False  # a thread waits for room in the queue, or until a message is done
        self._was_up = False
        self.down_since: float | None = None  # None while it is up or was never dialed
        self._cipher: RecordCipher | None = None
        self._parts: deque[memoryview] = deque()  # to be written next
        self._ends: deque[tuple[int, Outgoing]] = deque()  # where messages end in these parts
        self._written = 0  # bytes of these parts
        self._staged = bytearray()

    def seconds_down(self) -> float:
        """The time for which the connection has been down; 0 while it is up or was never dialed."""
        since = self.down_since
        return 0.0 if since is None else monotonic() - since

    def up(self, connection: socket.socket, cipher: RecordCipher | None) -> None:
        """Start to use this socket after its handshake; the lock is held."""
        self.socket, self._cipher = connection, cipher
        self.down_since = None
        self._was_up = True
        if cipher is not None and not self._staged:
            self._staged = bytearray(CIPHERTEXT_STAGE_BYTES)

    def mark_down(self) -> socket.socket | None:
        """Note that the connection broke or could not be opened; the lock is held. A partly written
        message is lost, those behind it are not. Returns the socket that the caller closes."""
        lost, self.socket = self.socket, None
        self.has_broken = self.has_broken or self._was_up
        if self.down_since is None:
            self.down_since = monotonic()
        self._drop_partly_written()
        return lost

    def leave(self, record: PeerRecord) -> socket.socket | None:
        """Note that the peer has a new record, and drop the messages to the old one; the lock is
        held. Returns the socket that the caller closes."""
        lost, self.socket = self.socket, None
        self.peer_record = record
        self.down_since = None
        self._drop_partly_written()
        while self.queue:
            self.queue.popleft().done = True
        return lost

    def flush(self) -> bool:
        """Write what the socket accepts; True if nothing is left. The lock is held. OSError if the
        connection is broken."""
        if self.socket is None:
            return not self.queue
        while self._parts or self.queue:
            if not self._parts:
                self._stage()
            nbytes, chunk = 0, []
            for part in self._parts:
                nbytes += len(part)
                chunk.append(part)
                if nbytes >= WRITE_CHUNK_BYTES:
                    break
            try:
                self._advance(self.socket.sendmsg(chunk))
            except BlockingIOError:
                return False
        return True

    @property
    def is_empty(self) -> bool:
        """True if all messages were written."""
        return not self.queue and not self._parts

    def _stage(self) -> None:
        """Prepare the bytes to write next."""
        self._written = nbytes = 0
        if self._cipher is not None:
            self._seal(self._cipher)
            return
        while self.queue and len(self._parts) < MAX_BUFFERS_PER_SEND:
            message = self.queue.popleft()
            self._parts.append(memoryview(message.header))
            payload = message.payload
            for at in range(0, len(payload), WRITE_CHUNK_BYTES):
                self._parts.append(payload[at : at + WRITE_CHUNK_BYTES])
            nbytes += len(message.header) + len(message.payload)
            self._ends.append((nbytes, message))

    def _seal(self, cipher: RecordCipher) -> None:
        out, at = memoryview(self._staged), 0
        while self.queue:
            message = self.queue[0]
            header = message.header if not message.at else b""
            plain = message.payload[message.at : message.at + RECORD_NBYTES]
            end = at + len(header) + len(plain) + TAG_NBYTES
            if end > len(out):
                break
            out[at : at + len(header)] = header
            cipher.seal(plain, header, out[at + len(header) : end])
            at = end
            message.at += len(plain)
            if message.at == len(message.payload):
                message.done = True
                self.queue.popleft()
        self._parts.append(out[:at])

    def _advance(self, written: int) -> None:
        self._written += written
        while self._ends and self._ends[0][0] <= self._written:
            self._ends.popleft()[1].done = True
        while self._parts and written >= len(self._parts[0]):
            written -= len(self._parts.popleft())
        if written:
            self._parts[0] = self._parts[0][written:]

    def _drop_partly_written(self) -> None:
        self._parts.clear()
        while self._ends:
            self._ends.popleft()[1].done = True
        if self.queue and self.queue[0].at:
            self.queue.popleft().done = True


class Received(NamedTuple):
    """A message that was received from this rank."""

    rank: int
    header: bytes
    array: Array


ChooseLanding = Callable[[int, bytes, int], Landing | None]
"""The target of a payload, by sender, header and length; None: new memory."""


class Inbound:
    """A connection from a peer to this rank."""

    def __init__(
        self, connection: socket.socket, rank: int, cipher: RecordCipher | None, header_nbytes: int
    ) -> None:
        self.socket = connection
        self.rank = rank
        self._cipher = cipher
        self._header_nbytes = header_nbytes
        # A silent or hostile connection costs only the pages that it fills.
        self._view = np.empty(
            READ_BUFFER_BYTES if cipher is None else CIPHERTEXT_STAGE_BYTES, np.uint8
        ).data
        self._begin = self._end = 0  # of the unparsed bytes in the buffer
        self._header: bytes | None = None  # of the incoming message
        self._nbytes = 0  # of its payload
        self._at = 0  # received bytes of the payload
        self._array = EMPTY_ARRAY  # the payload, or its target
        self._is_placed = False  # True if `place` chose the array of the incoming message
        self._into = EMPTY_MEMORY  # the memory of this array
        self._add: Add | None = None  # consumes pieces, where they are not just stored
        self._scratch = EMPTY_MEMORY  # for such pieces
        self._kept = 0  # bytes in it that are not a whole number of elements yet

    def read(self, messages: list[Received], place: ChooseLanding) -> bool:
        """Append the messages that are complete; False if the connection has ended. RejectedMessage
        if the next one does not authenticate, or is incomplete at the end."""
        left = MAX_BYTES_PER_TURN
        while left > 0:
            missing = self._nbytes - self._at
            direct = (
                self._cipher is None
                and missing >= MIN_DIRECT_READ_BYTES
                and self._begin == self._end
            )
            room = self._target(missing) if direct else self._room()
            try:
                number = self.socket.recv_into(room, min(len(room), MAX_BYTES_PER_TURN))
            except BlockingIOError:
                break
            except OSError:
                number = 0
            if not number:
                if self._header is not None:
                    raise RejectedMessage(RejectionReason.TRUNCATED)
                return False
            left -= number
            if direct:
                self._advance(number)
                if self._at == self._nbytes:
                    messages.append(self._finished())
            else:
                self._end += number
                self._parse(messages, place)
            if number < len(room):
                break  # no more has arrived
        return True

    def detach_target(self) -> None:
        """Read the rest of the incoming message into new memory if `place` chose its target, which
        is needed for another purpose. That message is not to be used. A message in memory of its
        own is complete: it may belong to the epoch that begins."""
        if self._is_placed:
            self._set_target(np.empty(self._nbytes, np.uint8), None)

    def _room(self) -> memoryview:
        """The free part of the buffer, after unparsed bytes were moved to its beginning."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin:
            size = self._end - self._begin
            self._view[:size] = self._view[self._begin : self._end]
            self._begin, self._end = 0, size
        return self._view[self._end :]

    def _target(self, nbytes: int) -> memoryview:
        """The memory for the next bytes of the payload, at most so many."""
        if self._add is None:
            return self._into[self._at : self._at + nbytes]
        return self._scratch[self._kept : self._kept + nbytes]

    def _parse(self, messages: list[Received], place: ChooseLanding) -> None:
        while True:
            if self._header is None:
                if self._end - self._begin < self._header_nbytes:
                    return
                self._start(place)
            if self._cipher is not None:
                if not self._decrypt(self._cipher):
                    return
            elif not self._copy():
                return
            if self._at == self._nbytes:
                messages.append(self._finished())

    def _start(self, place: ChooseLanding) -> None:
        header = bytes(self._view[self._begin : self._begin + self._header_nbytes])
        self._begin += self._header_nbytes
        nbytes = int.from_bytes(header[-PAYLOAD_LENGTH_BYTES:], "little")
        landing = place(self.rank, header, nbytes)
        self._header, self._nbytes, self._at = header, nbytes, 0
        self._is_placed = landing is not None
        if landing is not None:
            self._set_target(landing.array, landing.add)
            return
        try:
            self._set_target(np.empty(nbytes, np.uint8), None)
        except (MemoryError, ValueError):
            raise RejectedMessage(RejectionReason.TOO_LARGE) from None

    def _set_target(self, array: Array, add: Add | None) -> None:
        self._array, self._add, self._kept = array, add, 0
        self._into = array.data if self._nbytes else EMPTY_MEMORY
        if add is not None and not self._scratch:
            self._scratch = np.empty(RECORD_NBYTES, np.uint8).data

    def _copy(self) -> bool:
        """Copy the payload's bytes in the buffer, in plain text; False if the buffer needs more."""
        into = self._target(min(self._end - self._begin, self._nbytes - self._at))
        number = len(into)
        into[:] = self._view[self._begin : self._begin + number]
        self._begin += number
        self._advance(number)
        return self._at == self._nbytes or self._begin < self._end

    def _decrypt(self, cipher: RecordCipher) -> bool:
        """Decrypt the next record; False if it has not arrived as a whole."""
        number = min(RECORD_NBYTES, self._nbytes - self._at)
        end = self._begin + number + TAG_NBYTES
        if end > self._end:
            return False
        header = self._header if not self._at else b""
        assert header is not None
        if not cipher.open(self._view[self._begin : end], header, self._target(number)):
            raise RejectedMessage(RejectionReason.TAMPERED)
        self._begin = end
        self._advance(number)
        return True

    def _advance(self, number: int) -> None:
        """Note that this many more bytes are in the target, or in the scratch buffer."""
        self._at += number
        if self._add is None:
            return
        stored = self._kept + number
        whole = stored if self._at == self._nbytes else stored - stored % ELEMENT_ALIGNMENT_BYTES
        self._add(self._at - stored, self._scratch[:whole])
        self._kept = stored - whole
        if self._kept:
            self._scratch[: self._kept] = self._scratch[whole:stored]

    def _finished(self) -> Received:
        assert self._header is not None
        message = Received(self.rank, self._header, self._array)
        self._header, self._array, self._into, self._add = None, EMPTY_ARRAY, EMPTY_MEMORY, None
        self._is_placed = False
        return message

"""The endpoint of a rank: its listening socket, peer authentication, and lookup of other ranks.

Each endpoint makes a key pair of its own. The public half is in the record that it publishes in the
store, and each side of a connection proves that it has the private half of its record's key
(`handshake`). With a job secret a record is trusted by its signature alone, without a lookup.

The network thread accepts connections, does both sides' handshakes, opens broken connections again,
and writes what a socket didn't accept at once. It never waits for a peer: a silent connection is
dropped after a timeout, and the oldest ones first if there are many.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from time import monotonic, sleep

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from thalweg.errors import NotTrusted, RunError, TransportError
from thalweg.transports.cipher import RecordCipher
from thalweg.transports.connection import Outbound, prepare
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
from thalweg.transports.peer_record import PeerRecord
from thalweg.transports.rejections import RejectionCounter, RejectionReason
from thalweg.transports.security import SecurityConfig
from thalweg.transports.store_client import Store, StoreClient
from thalweg.transports.tcp_info import answers

log = logging.getLogger("thalweg")
READ_EVENT, WRITE_EVENT = selectors.EVENT_READ, selectors.EVENT_WRITE
ENDPOINT_BACKLOG_COUNT = 1024  # connections to be accepted, and in a handshake
HANDSHAKE_TIMEOUT_SECONDS = 5.0
DIAL_TIMEOUT_SECONDS = 3.0
LIVENESS_POLL_SECONDS = 1.0  # between two checks that peers still acknowledge
REDIAL_SECONDS = 0.1  # before a failed connection is tried again
STORE_ANSWER_POLL_SECONDS = 0.005
Admit = Callable[[socket.socket, int, RecordCipher | None], None]
"""Called in the network thread with an authenticated connection from a rank."""


@dataclass(slots=True, eq=False)
class _IncomingHandshake:
    """An accepted connection that is not authenticated yet."""

    socket: socket.socket
    deadline: float
    hello: bytearray = field(default_factory=bytearray)
    wanted: int = WIRE_PREFIX_STRUCT.size  # bytes of the hello
    peer_record: PeerRecord | None = None
    reply: bytes = b""
    cipher: RecordCipher | None = None
    record_lookup: Future[bytes] | None = None  # in the store


@dataclass(slots=True, eq=False)
class _OutgoingHandshake:
    """A connection from this rank during its handshake."""

    outbound: Outbound
    peer_record: PeerRecord
    socket: socket.socket
    deadline: float
    hello: Hello
    reply: bytearray = field(default_factory=bytearray)
    hello_sent: bool = False


class Endpoint:
    """The endpoint of one transport of a rank. `purpose` separates the records of different
    transports in one store, `namespace` their connections. The network thread calls `on_change`
    when a connection comes up or goes down, or when an awaited one has made progress."""

    def __init__(
        self,
        rank: int,
        store: Store,
        host: str,
        *,
        purpose: str,
        namespace: str,
        security: SecurityConfig | None,
        admit: Admit,
        on_change: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.protection = security or SecurityConfig(refused=RejectionCounter(rank))
        self.refused = self.protection.refused
        self._admit = admit
        self._on_change = on_change
        self._signer = self.protection.signer(purpose)
        private = X25519PrivateKey.generate() if self.protection.encrypted else None
        self._listener = _listening(rank, host)
        shown = f"[{host}]" if ":" in host else host
        self.record = PeerRecord(
            rank=rank,
            endpoint=f"tcp://{shown}:{self._listener.getsockname()[1]}",
            key=private.public_key().public_bytes_raw() if private else b"",
        )
        self._identity = Identity(
            record=self.record,
            private=private,
            signer=self._signer,
            scope=scope_of(purpose, self.protection.run, namespace),
        )
        self.text = self._identity.text
        self._store_client = StoreClient(store, rank)
        self._known: dict[int, PeerRecord] = {}
        self._callers: dict[_IncomingHandshake, None] = {}  # the oldest first
        self._dialing: dict[Outbound, _OutgoingHandshake] = {}
        self._outbound: set[Outbound] = set()
        self._next_check = 0.0  # of their liveness
        self._dial_queue: deque[tuple[float, Outbound]] = deque()  # not before these times
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker, self._listener):
            end.setblocking(False)
        try:
            self._publish(store)
        except BaseException:
            self._close_sockets()
            raise
        self._selector.register(self._woken, READ_EVENT)
        self._selector.register(self._listener, READ_EVENT)
        self._thread = Thread(target=self._work, name="thalweg-network", daemon=True)
        self._thread.start()

    def use_store(self, store: Store) -> None:
        """Look peers up in this store from now on, and publish this rank's record there; RunError
        if it doesn't answer."""
        client = StoreClient(store, self.rank)
        client.call(self._publish)
        self._store_client = client

    def find(self, peer: int) -> PeerRecord | None:
        """The record of a peer; None if there is none, or no store. NotTrusted if it is not a
        record of this job."""
        name = self._signer.key_of(peer)
        text = b""
        with suppress(RunError):  # the store is lost
            text = self._store_client.call(lambda store: _get(store, name))
        if not text:
            return None
        record = self.trusted(text, peer)
        if record is None:
            raise NotTrusted(
                f"the address of rank {peer} in the store wasn't published with this job's secret, "
                f"or with encryption {self.protection.mode}",
                "start all workers with the same THALWEG_SECRET and THALWEG_ENCRYPTION",
            )
        return record

    def trusted(self, text: bytes, peer: int) -> PeerRecord | None:
        """The record in this text; None if it isn't a valid one of this peer."""
        record = self._signer.read(text)
        if record is None or record.rank != peer:
            self.refused.count(RejectionReason.FORGED)
            return None
        self._known[peer] = record
        return record

    # Connections from this rank, called by the thread that uses them

    def dial(self, outbound: Outbound) -> None:
        """Open this connection, and again whenever it breaks."""
        self._outbound.add(outbound)
        self._enqueue(outbound, 0.0)

    def move(self, outbound: Outbound, record: PeerRecord) -> bool:
        """Connect to this record instead; False if the connection has it already."""
        with outbound.lock:
            if record == outbound.peer_record:
                return False
            self._drop(outbound.leave(record))
        self._enqueue(outbound, 0.0)
        return True

    def hang_up(self, outbound: Outbound) -> None:
        """Close this connection permanently and drop its messages."""
        self._outbound.discard(outbound)
        with outbound.lock:
            outbound.closed = True
            self._drop(outbound.leave(outbound.peer_record))

    def write_on(self, outbound: Outbound, *, here: bool = True) -> None:
        """Write the rest in the network thread when the socket accepts more, or stop doing so. The
        connection's lock is held."""
        if outbound.socket is not None:
            self._selector.modify(
                outbound.socket, READ_EVENT | WRITE_EVENT if here else READ_EVENT, outbound
            )

    def mark_broken(self, outbound: Outbound) -> None:
        """Close this connection after a failure and dial it again; its lock is held."""
        self._drop(outbound.mark_down())
        self._enqueue(outbound, REDIAL_SECONDS)

    def close(self) -> None:
        """Stop the network thread, once all connections are closed."""
        self._closed = True
        self._wake()
        self._thread.join(HANDSHAKE_TIMEOUT_SECONDS)

    def _enqueue(self, outbound: Outbound, seconds: float) -> None:
        self._dial_queue.append((monotonic() + seconds, outbound))
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b"!")

    def _drop(self, connection: socket.socket | None) -> None:
        if connection is not None:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(connection)
            connection.close()

    # The network thread

    def _work(self) -> None:
        while not self._closed:
            try:
                for key, events in self._selector.select(self._seconds()):
                    self._handle(key, events)
                self._dial_due()
                self._check_deadlines()
            except Exception:  # a defect: the other connections still need this thread
                log.exception("the network thread of rank %d continues after an error", self.rank)
                sleep(REDIAL_SECONDS)
        for caller in self._callers:
            caller.socket.close()
        for dialing in self._dialing.values():
            dialing.socket.close()
        self._close_sockets()

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._woken:
            with suppress(OSError):
                self._woken.recv(4096)
        elif isinstance(key.data, Outbound):
            self._continue(key.data, events)
        elif isinstance(key.data, _IncomingHandshake) and key.data in self._callers:  # still
            self._read_hello(key.data)
        elif isinstance(key.data, _OutgoingHandshake) and key.data in self._dialing.values():
            self._shake_hands(key.data)

    def _close_sockets(self) -> None:
        self._selector.close()
        for end in (self._woken, self._waker, self._listener):
            end.close()

    def _seconds(self) -> float | None:
        """The time until the next deadline; None if there is none."""
        now = monotonic()
        if any(caller.record_lookup is not None for caller in self._callers):
            return STORE_ANSWER_POLL_SECONDS
        oldest = next(iter(self._callers), None)
        times = [when for when, _ in tuple(self._dial_queue)]
        times += [self._next_check] if self._outbound else []
        times += [dialing.deadline for dialing in self._dialing.values()]
        if oldest is not None:
            times.append(oldest.deadline)
        return max(0.0, min(times) - now) if times else None

    def _dial_due(self) -> None:
        for _ in range(len(self._dial_queue)):
            when, outbound = self._dial_queue.popleft()
            if when > monotonic():
                self._dial_queue.append((when, outbound))
            elif not outbound.closed:
                self._connect(outbound)

    def _check_deadlines(self) -> None:
        now = monotonic()
        for dialing in [d for d in self._dialing.values() if d.deadline <= now]:
            self._failed(dialing)
        for caller in list(self._callers):
            if caller.record_lookup is not None and caller.record_lookup.done():
                self._admit_as_in_store(caller, caller.record_lookup)
            elif caller.deadline <= now:
                self._turn_away(caller, RejectionReason.UNFINISHED)
            elif caller.record_lookup is None:
                break  # the others came later
        if now >= self._next_check:
            self._next_check = now + LIVENESS_POLL_SECONDS
            for outbound in tuple(self._outbound):
                self._check_liveness(outbound)

    def _check_liveness(self, outbound: Outbound) -> None:
        """Close a connection whose peer no longer acknowledges, as that of a host that is cut
        off."""
        with outbound.lock:
            if outbound.socket is None or answers(outbound.socket):
                return
            self.mark_broken(outbound)
        self._on_change()

    def _continue(self, outbound: Outbound, events: int) -> None:
        """Write on a connection that accepts more, or close one that the peer closed."""
        with outbound.lock:
            if outbound.socket is None:
                return
            try:
                if events & READ_EVENT and not _is_open(outbound.socket):
                    raise ConnectionResetError
                if outbound.flush() and events & WRITE_EVENT:
                    self._selector.modify(outbound.socket, READ_EVENT, outbound)
            except OSError:
                self.mark_broken(outbound)
                notify = True
            else:
                notify, outbound.awaited = outbound.awaited, False
        if notify:
            self._on_change()

    # Connections that this rank opens

    def _connect(self, outbound: Outbound) -> None:
        former = self._dialing.pop(outbound, None)
        if former is not None:
            self._drop(former.socket)
        with outbound.lock:
            record = outbound.peer_record
            if outbound.socket is not None:
                return
        host, _, port = record.endpoint.removeprefix("tcp://").rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            hello = Hello(self._identity, record)
            connection = socket.socket(family, socket.SOCK_STREAM)
        except (ValueError, OSError):  # an invalid key in a record, or no free descriptor
            self._fail(outbound, record)
            return
        prepare(connection)
        handshake = _OutgoingHandshake(
            outbound, record, connection, monotonic() + DIAL_TIMEOUT_SECONDS, hello
        )
        self._dialing[outbound] = handshake
        try:
            with suppress(BlockingIOError):
                connection.connect((host, int(port)))
        except OSError:  # also one that cannot be resolved
            self._failed(handshake)
        else:
            self._selector.register(connection, WRITE_EVENT, handshake)

    def _shake_hands(self, handshake: _OutgoingHandshake) -> None:
        connection = handshake.socket
        try:
            if not handshake.hello_sent:
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, "cannot connect")
                connection.send(handshake.hello.text)  # a new socket has room for it
                handshake.hello_sent = True
                handshake.deadline = monotonic() + HANDSHAKE_TIMEOUT_SECONDS
                self._selector.modify(connection, READ_EVENT, handshake)
                return
            came = connection.recv(REPLY_NBYTES - len(handshake.reply))
            if not came:
                raise ConnectionResetError
            handshake.reply += came
            if len(handshake.reply) == REPLY_NBYTES:
                self._came_up(handshake, handshake.hello.finish(bytes(handshake.reply)))
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._failed(handshake)

    def _came_up(self, handshake: _OutgoingHandshake, cipher: RecordCipher | None) -> None:
        outbound, connection = handshake.outbound, handshake.socket
        del self._dialing[outbound]
        with outbound.lock:
            if outbound.closed or outbound.peer_record != handshake.peer_record:
                self._drop(connection)
                return
            outbound.up(connection, cipher)
            self._selector.modify(connection, READ_EVENT, outbound)
            try:
                if not outbound.flush():
                    self.write_on(outbound)
            except OSError:
                self.mark_broken(outbound)
            outbound.awaited = False
        self._on_change()

    def _failed(self, handshake: _OutgoingHandshake) -> None:
        del self._dialing[handshake.outbound]
        self._drop(handshake.socket)
        self._fail(handshake.outbound, handshake.peer_record)

    def _fail(self, outbound: Outbound, record: PeerRecord) -> None:
        """Mark a connection broken that could not be opened, unless the peer has a new record."""
        with outbound.lock:
            if not outbound.closed and outbound.peer_record == record:
                self.mark_broken(outbound)
        self._on_change()

    # Connections that peers open

    def _accept(self) -> None:
        try:
            while True:
                connection, _ = self._listener.accept()
                prepare(connection)
                handshake = _IncomingHandshake(connection, monotonic() + HANDSHAKE_TIMEOUT_SECONDS)
                self._callers[handshake] = None
                self._selector.register(connection, READ_EVENT, handshake)
                if len(self._callers) > ENDPOINT_BACKLOG_COUNT:
                    self._turn_away(next(iter(self._callers)), RejectionReason.UNFINISHED)
        except BlockingIOError:
            pass
        except OSError:  # no descriptor is free: don't try again at once
            sleep(REDIAL_SECONDS)

    def _read_hello(self, handshake: _IncomingHandshake) -> None:
        if handshake.record_lookup is not None:  # it sent more before the reply, or closed
            self._turn_away(handshake, RejectionReason.STRANGER)
            return
        try:
            came = handshake.socket.recv(handshake.wanted - len(handshake.hello))
        except BlockingIOError:
            return
        except OSError:
            came = b""
        handshake.hello += came
        if not came:
            strange = bool(handshake.hello) and not WIRE_MAGIC.startswith(
                handshake.hello[: len(WIRE_MAGIC)]
            )
            self._turn_away(
                handshake, RejectionReason.STRANGER if strange else RejectionReason.UNFINISHED
            )
        elif len(handshake.hello) == handshake.wanted:
            if handshake.wanted > WIRE_PREFIX_STRUCT.size:
                self._check_hello(handshake)
                return
            magic, version, nbytes = WIRE_PREFIX_STRUCT.unpack(handshake.hello)
            if magic != WIRE_MAGIC or not 0 < nbytes <= HELLO_NBYTES:
                self._turn_away(handshake, RejectionReason.STRANGER)
            elif version != WIRE_VERSION:
                self._turn_away(handshake, RejectionReason.MALFORMED)
            else:
                handshake.wanted += nbytes

    def _check_hello(self, handshake: _IncomingHandshake) -> None:
        """Check a complete hello."""
        hello = bytes(handshake.hello)
        record = handshake.peer_record = sender_of(self._identity, hello)
        if record is None:
            self._turn_away(handshake, RejectionReason.FORGED)
            return
        try:
            handshake.reply, handshake.cipher = answered(self._identity, hello, record)
        except ValueError:
            self._turn_away(handshake, RejectionReason.STRANGER)
            return
        # Only peers that know this rank's record from the store cause a lookup in it.
        trusts_store = self.protection.secret is None and self.protection.encrypted
        if trusts_store and self._known.get(record.rank) != record:
            self._look_up_record(handshake, record.rank)
        else:
            self._admit_peer(handshake, record)

    def _look_up_record(self, handshake: _IncomingHandshake, rank: int) -> None:
        name = self._signer.key_of(rank)
        try:
            handshake.record_lookup = self._store_client.call_async(lambda store: _get(store, name))
        except RunError:
            self._turn_away(handshake, RejectionReason.UNFINISHED)

    def _admit_as_in_store(self, handshake: _IncomingHandshake, looked_up: Future[bytes]) -> None:
        try:
            record = self._signer.read(looked_up.result())
        except RuntimeError:  # torch's DistError is one
            self._turn_away(handshake, RejectionReason.UNFINISHED)
            return
        if record is None or record != handshake.peer_record:
            self._turn_away(handshake, RejectionReason.STRANGER)
            return
        self._known[record.rank] = record
        self._admit_peer(handshake, record)

    def _admit_peer(self, handshake: _IncomingHandshake, record: PeerRecord) -> None:
        try:
            handshake.socket.send(handshake.reply)  # a new socket has room for it
        except OSError:
            self._turn_away(handshake, RejectionReason.UNFINISHED)
            return
        del self._callers[handshake]
        self._selector.unregister(handshake.socket)
        self._admit(handshake.socket, record.rank, handshake.cipher)

    def _turn_away(self, handshake: _IncomingHandshake, why: RejectionReason) -> None:
        del self._callers[handshake]
        self._drop(handshake.socket)
        self.refused.count(why)

    def _publish(self, store: Store) -> None:
        store.set(self._signer.key_of(self.rank), self.text.decode())


def _listening(rank: int, host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=ENDPOINT_BACKLOG_COUNT)
    except OSError as error:
        raise TransportError(
            f"rank {rank} can't listen on {host}: {error.strerror or error}", "name another address"
        ) from None


def _is_open(connection: socket.socket) -> bool:
    """False if the peer closed the connection: it sends nothing after the handshake."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    return False


def _get(store: Store, name: str) -> bytes:
    """The value of this key in the store; empty if there is none."""
    return store.get(name) if store.check([name]) else b""

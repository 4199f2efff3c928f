"""The endpoint of a rank: its listening socket, peer authentication, and lookup of other ranks.

Each endpoint makes a key pair of its own. The public half is in the record that it publishes in the
store, and each side of a connection proves that it has the private half of its record's key
(`handshake`). With a job secret a record is trusted by its signature alone, without a lookup.

The network thread accepts connections, does both sides' handshakes, opens broken connections again,
and writes what a socket didn't accept at once. It never waits for a peer: a handshake is a
generator that yields where it waits, a silent connection is dropped after a timeout, and the oldest
ones first if there are many.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from sched import Event, scheduler
from threading import Thread
from time import monotonic, sleep
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from thalweg.errors import NotTrusted, RunError, TransportError
from thalweg.transports.cipher import RecordCipher
from thalweg.transports.connection import Outbound, RejectedMessage, prepare
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
from thalweg.transports.selector import READ_EVENT, WRITE_EVENT, WakeableSelector
from thalweg.transports.store_client import Store, StoreClient
from thalweg.transports.tcp_info import answers

log = logging.getLogger("thalweg")
ENDPOINT_BACKLOG_COUNT = 1024  # connections to be accepted, and in a handshake
HANDSHAKE_TIMEOUT_SECONDS = 5.0
DIAL_TIMEOUT_SECONDS = 3.0
LIVENESS_POLL_SECONDS = 1.0  # between two checks that peers still acknowledge
REDIAL_SECONDS = 0.1  # before a failed connection is tried again
HANDSHAKE_ERRORS = (RejectedMessage, OSError, ValueError, RunError, RuntimeError)  # DistError, too
Admit = Callable[[socket.socket, int, RecordCipher | None], None]
"""Called in the network thread with an authenticated connection from a rank."""
Steps = Generator[int, None, None]
"""The code of a handshake, which yields the event of its socket that it waits for."""


@dataclass(slots=True, eq=False)
class _Handshake:
    """A connection that is not authenticated yet; `outbound` is None if a peer opened it."""

    socket: socket.socket
    outbound: Outbound | None = None
    peer_record: PeerRecord | None = None  # of the peer that is called
    steps: Steps = field(init=False)
    expiry: Event = field(init=False)
    ended: bool = False


class Endpoint:
    """The endpoint of one transport of a rank. `purpose` separates the records of different
    transports in one store, `namespace` their connections."""

    def __init__(
        self,
        rank: int,
        store: Store,
        host: str,
        *,
        purpose: str,
        security: SecurityConfig | None,
        namespace: str = "",
    ) -> None:
        self.rank = rank
        self.protection = security or SecurityConfig(refused=RejectionCounter(rank))
        self.refused = self.protection.refused
        self._signer = self.protection.signer(purpose)
        private = X25519PrivateKey.generate() if self.protection.encrypted else None
        self._listener = _listening(rank, host)
        self._listener.setblocking(False)
        shown = f"[{host}]" if ":" in host else host
        self.record = PeerRecord(
            rank=rank,
            endpoint=f"tcp://{shown}:{self._listener.getsockname()[1]}",
            key=private.public_key().public_bytes_raw() if private else b"",
        )
        self.identity = Identity(
            record=self.record,
            private=private,
            signer=self._signer,
            scope=scope_of(purpose, self.protection.run, namespace),
        )
        self._store_client = StoreClient(store, rank)
        self._known: dict[int, PeerRecord] = {}
        self._callers: dict[_Handshake, None] = {}  # with peers that call, the oldest first
        self._dialing: dict[Outbound, _Handshake] = {}
        self._timers = scheduler(monotonic, sleep)
        self._closed = False
        self._selector = WakeableSelector()
        try:
            self._publish(store)
        except BaseException:
            self._close_sockets()
            raise

    def start(self, admit: Admit, on_change: Callable[[], None]) -> None:
        """Start the network thread. It calls `on_change` when a connection comes up or goes down,
        or when an awaited one has made progress."""
        self._admit = admit
        self._on_change = on_change
        self._selector.register(self._listener, READ_EVENT, self._accept)
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
        self._timers.enter(LIVENESS_POLL_SECONDS, 0, self._check_liveness, (outbound,))
        self._call_soon(self._connect, outbound)

    def move(self, outbound: Outbound, record: PeerRecord) -> bool:
        """Connect to this record instead; False if the connection has it already."""
        with outbound.lock:
            if record == outbound.peer_record:
                return False
            self._drop(outbound.leave(record))
        self._call_soon(self._connect, outbound)
        return True

    def hang_up(self, outbound: Outbound) -> None:
        """Close this connection permanently and drop its messages."""
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
        self._call_soon(self._connect, outbound, REDIAL_SECONDS)

    def close(self) -> None:
        """Stop the network thread, once all connections are closed."""
        self._closed = True
        self._selector.wake()
        self._thread.join(HANDSHAKE_TIMEOUT_SECONDS)

    def _call_soon(
        self, action: Callable[[Any], None], argument: object, seconds: float = 0.0
    ) -> None:
        """Let the network thread call this function after a time; any thread may call this."""
        self._timers.enter(seconds, 0, action, (argument,))
        self._selector.wake()

    def _drop(self, connection: socket.socket | None) -> None:
        if connection is not None:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(connection)
            connection.close()

    # The network thread

    def _work(self) -> None:
        while not self._closed:
            try:
                for key, events in self._selector.select(self._timers.run(blocking=False)):
                    if isinstance(key.data, Outbound):
                        self._continue(key.data, events)
                    elif isinstance(key.data, _Handshake):
                        self._advance(key.data)
                    else:
                        key.data()
            except Exception:  # a defect: the other connections still need this thread
                log.exception("the network thread of rank %d continues after an error", self.rank)
                sleep(REDIAL_SECONDS)
        for handshake in (*self._callers, *self._dialing.values()):
            handshake.socket.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._selector.close()
        self._listener.close()

    def _check_liveness(self, outbound: Outbound) -> None:
        """Close a connection whose peer no longer acknowledges, as that of a host that is cut off;
        from time to time."""
        if outbound.closed:
            return
        # At the same times for all connections: they wake this thread only once.
        due = LIVENESS_POLL_SECONDS * (monotonic() // LIVENESS_POLL_SECONDS + 1)
        self._timers.enterabs(due, 0, self._check_liveness, (outbound,))
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

    # Handshakes

    def _begin(self, handshake: _Handshake, steps: Steps, seconds: float) -> None:
        handshake.steps = steps
        self._limit(handshake, seconds)
        self._selector.register(handshake.socket, READ_EVENT, handshake)
        self._advance(handshake)

    def _limit(self, handshake: _Handshake, seconds: float) -> None:
        """Let a handshake fail unless it has ended after this time."""
        handshake.expiry = self._timers.enter(seconds, 0, self._fail, (handshake, TimeoutError()))

    def _advance(self, handshake: _Handshake) -> None:
        if handshake.ended:  # by another event of the same time
            return
        try:
            self._selector.modify(handshake.socket, next(handshake.steps), handshake)
        except StopIteration:
            self._end(handshake)
        except Exception as error:
            self._fail(handshake, error)
            if not isinstance(error, HANDSHAKE_ERRORS):
                raise

    def _end(self, handshake: _Handshake) -> None:
        handshake.ended = True
        handshake.steps.close()
        with suppress(ValueError):  # it has expired
            self._timers.cancel(handshake.expiry)
        if handshake.outbound is None:
            del self._callers[handshake]
        else:
            del self._dialing[handshake.outbound]

    def _fail(self, handshake: _Handshake, error: Exception) -> None:
        self._end(handshake)
        self._drop(handshake.socket)
        if handshake.outbound is not None:
            self._mark_unopened(handshake.outbound, handshake.peer_record)
        else:
            unfinished = RejectionReason.UNFINISHED
            self.refused.count(error.why if isinstance(error, RejectedMessage) else unfinished)

    def _mark_unopened(self, outbound: Outbound, record: PeerRecord | None) -> None:
        """Mark a connection broken that could not be opened, unless the peer has a new record."""
        with outbound.lock:
            if not outbound.closed and outbound.peer_record == record:
                self.mark_broken(outbound)
        self._on_change()

    def _connect(self, outbound: Outbound) -> None:
        former = self._dialing.get(outbound)
        if former is not None:
            self._end(former)
            self._drop(former.socket)
        with outbound.lock:
            record = outbound.peer_record
            if outbound.closed or outbound.socket is not None:
                return
        host, _, port = record.endpoint.removeprefix("tcp://").rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # no descriptor is free
            self._mark_unopened(outbound, record)
            return
        prepare(connection)
        handshake = self._dialing[outbound] = _Handshake(connection, outbound, record)
        steps = self._call(handshake, outbound, record, (host, int(port)))
        self._begin(handshake, steps, DIAL_TIMEOUT_SECONDS)

    def _call(
        self,
        handshake: _Handshake,
        outbound: Outbound,
        record: PeerRecord,
        address: tuple[str, int],
    ) -> Steps:
        """The handshake with the peer of this record, which this rank calls."""
        connection = handshake.socket
        hello = Hello(self.identity, record)
        with suppress(BlockingIOError):
            connection.connect(address)
        yield WRITE_EVENT
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "cannot connect")
        connection.send(hello.text)  # a new socket has room for it
        self._timers.cancel(handshake.expiry)
        self._limit(handshake, HANDSHAKE_TIMEOUT_SECONDS)
        reply = bytearray()
        yield from _receive(connection, reply, REPLY_NBYTES)
        cipher = hello.finish(bytes(reply))
        with outbound.lock:
            if outbound.closed or outbound.peer_record != record:
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

    def _accept(self) -> None:
        try:
            while True:
                connection, _ = self._listener.accept()
                prepare(connection)
                handshake = _Handshake(connection)
                self._callers[handshake] = None
                self._begin(handshake, self._answer(handshake), HANDSHAKE_TIMEOUT_SECONDS)
                if len(self._callers) > ENDPOINT_BACKLOG_COUNT:
                    self._fail(next(iter(self._callers)), TimeoutError())
        except BlockingIOError:
            pass
        except OSError:  # no descriptor is free: don't try again at once
            sleep(REDIAL_SECONDS)

    def _answer(self, handshake: _Handshake) -> Steps:
        """The handshake with a peer that calls, whose record is in its hello."""
        hello = yield from _receive_hello(handshake.socket)
        record = sender_of(self.identity, hello)
        if record is None:
            raise RejectedMessage(RejectionReason.FORGED)
        try:
            reply, cipher = answered(self.identity, hello, record)
        except ValueError:
            raise RejectedMessage(RejectionReason.STRANGER) from None
        # Only peers that know this rank's record from the store cause a lookup in it.
        trusts_store = self.protection.secret is None and self.protection.encrypted
        if trusts_store and self._known.get(record.rank) != record:
            name = self._signer.key_of(record.rank)
            lookup = self._store_client.call_async(lambda store: _get(store, name))
            lookup.add_done_callback(lambda _: self._call_soon(self._advance, handshake))
            yield READ_EVENT
            # Otherwise it sent more before the reply, or closed.
            if not lookup.done() or self._signer.read(lookup.result()) != record:
                raise RejectedMessage(RejectionReason.STRANGER)
            self._known[record.rank] = record
        handshake.socket.send(reply)  # a new socket has room for it
        self._selector.unregister(handshake.socket)
        self._admit(handshake.socket, record.rank, cipher)

    def _publish(self, store: Store) -> None:
        store.set(self._signer.key_of(self.rank), self.identity.text.decode())


def _receive_hello(connection: socket.socket) -> Generator[int, None, bytes]:
    hello = bytearray()
    try:
        yield from _receive(connection, hello, WIRE_PREFIX_STRUCT.size)
        magic, version, nbytes = WIRE_PREFIX_STRUCT.unpack(hello)
        if magic != WIRE_MAGIC or not 0 < nbytes <= HELLO_NBYTES:
            raise RejectedMessage(RejectionReason.STRANGER)
        if version != WIRE_VERSION:
            raise RejectedMessage(RejectionReason.MALFORMED)
        yield from _receive(connection, hello, WIRE_PREFIX_STRUCT.size + nbytes)
    except OSError:
        if hello and not WIRE_MAGIC.startswith(hello[: len(WIRE_MAGIC)]):
            raise RejectedMessage(RejectionReason.STRANGER) from None
        raise
    return bytes(hello)


def _receive(connection: socket.socket, into: bytearray, size: int) -> Steps:
    """Receive bytes until `into` has this size; OSError if the connection ends before."""
    while len(into) < size:
        yield READ_EVENT
        with suppress(BlockingIOError):
            data = connection.recv(size - len(into))
            if not data:
                raise ConnectionResetError
            into += data


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

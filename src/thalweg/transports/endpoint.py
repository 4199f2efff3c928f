"""A rank's door: where it listens, whom it lets in, and how it finds and reaches the others.

Each door has a key pair of its own, made when it is. The public half stands on the card that goes
into the store, and each side of a connection shows that it has the private half of its card's key
(`handshake`). With a job secret a card is believed by its seal alone, and nobody is looked up.

The network thread accepts connections, does both sides' handshakes, opens connections again that
broke, and writes what a socket didn't take at once. It never waits for anybody: a stranger that
stays silent is dropped after a while, and the oldest ones first if there are many.
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
    MAGIC,
    PREFIX,
    REPLY_NBYTES,
    VERSION,
    Hello,
    Identity,
    answered,
    scope_of,
    sender_of,
)
from thalweg.transports.peer_record import Card
from thalweg.transports.rejections import Refusal, Tally
from thalweg.transports.security import Protection
from thalweg.transports.store_client import Line, Store
from thalweg.transports.tcp_info import answers

log = logging.getLogger("thalweg")
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
BACKLOG = 1024  # connections that may wait to be accepted, and that may be in a handshake
HANDSHAKE = 5.0  # seconds for a connection to say who it is
NO_ANSWER = 3.0  # seconds for the other end to take a connection
LOOK = 1.0  # seconds between two looks whether the other ends still answer
REDIAL = 0.1  # seconds after which a connection that failed is tried again
LOOK_UP = 0.005  # seconds between two looks whether the store has answered
Admit = Callable[[socket.socket, int, RecordCipher | None], None]
"""Called in the network thread with a connection that a rank has opened to this one."""


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection that has not shown yet who it is."""

    socket: socket.socket
    deadline: float
    hello: bytearray = field(default_factory=bytearray)
    wanted: int = PREFIX.size  # bytes of the hello
    card: Card | None = None
    reply: bytes = b""
    cipher: RecordCipher | None = None
    looked_up: Future[bytes] | None = None  # what the store has as its card


@dataclass(slots=True, eq=False)
class _Dialing:
    """A connection of this rank's whose handshake is under way."""

    outbound: Outbound
    card: Card
    socket: socket.socket
    deadline: float
    hello: Hello
    reply: bytearray = field(default_factory=bytearray)
    said: bool = False


class Door:
    """`purpose` keeps the cards of different transports apart in one store, and `room` their
    connections. `news` is called in the network thread when a connection has come up or gone down,
    or when somebody waits for it and it has got on."""

    def __init__(
        self,
        rank: int,
        store: Store,
        host: str,
        *,
        purpose: str,
        room: str,
        protection: Protection | None,
        admit: Admit,
        news: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.protection = protection or Protection(refused=Tally(rank))
        self.refused = self.protection.refused
        self._admit = admit
        self._news = news
        self._sealer = self.protection.sealer(purpose)
        private = X25519PrivateKey.generate() if self.protection.encrypted else None
        self._listener = _listening(rank, host)
        shown = f"[{host}]" if ":" in host else host
        self.card = Card(
            rank=rank,
            endpoint=f"tcp://{shown}:{self._listener.getsockname()[1]}",
            key=private.public_key().public_bytes_raw() if private else b"",
        )
        self._identity = Identity(
            card=self.card,
            private=private,
            sealer=self._sealer,
            scope=scope_of(purpose, self.protection.run, room),
        )
        self.text = self._identity.text
        self._line = Line(store, rank)
        self._known: dict[int, Card] = {}
        self._callers: dict[_Caller, None] = {}  # the oldest first
        self._dialing: dict[Outbound, _Dialing] = {}
        self._outbound: set[Outbound] = set()
        self._looks = 0.0  # when to look after these
        self._orders: deque[tuple[float, Outbound]] = deque()  # whom to dial from when on
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
        self._selector.register(self._woken, READ)
        self._selector.register(self._listener, READ)
        self._thread = Thread(target=self._work, name="thalweg-network", daemon=True)
        self._thread.start()

    def meet_at(self, store: Store) -> None:
        """Find others in this store from now on, and be found there; RunError if it doesn't
        answer."""
        line = Line(store, self.rank)
        line.ask(self._publish)
        self._line = line

    def find(self, peer: int) -> Card | None:
        """The card of a peer; None if there is none, or no store. NotTrusted if it is not a card
        of this job's."""
        name = self._sealer.key_of(peer)
        text = b""
        with suppress(RunError):  # the store is gone
            text = self._line.ask(lambda store: _get(store, name))
        if not text:
            return None
        card = self.trusted(text, peer)
        if card is None:
            raise NotTrusted(
                f"what is in the store as rank {peer}'s address wasn't put there by a worker with "
                f"this job's secret, or one with encryption {self.protection.mode}",
                "start all workers with the same THALWEG_SECRET and THALWEG_ENCRYPTION",
            )
        return card

    def trusted(self, text: bytes, peer: int) -> Card | None:
        """The card that this text is, if it is this peer's."""
        card = self._sealer.read(text)
        if card is None or card.rank != peer:
            self.refused.count(Refusal.FORGED)
            return None
        self._known[peer] = card
        return card

    # Connections of this rank's, called by the thread that uses them

    def dial(self, outbound: Outbound) -> None:
        """Open this connection, and again whenever it breaks."""
        self._outbound.add(outbound)
        self._order(outbound, 0.0)

    def move(self, outbound: Outbound, card: Card) -> bool:
        """Connect there instead, if that is elsewhere."""
        with outbound.lock:
            if card == outbound.card:
                return False
            self._drop(outbound.leave(card))
        self._order(outbound, 0.0)
        return True

    def hang_up(self, outbound: Outbound) -> None:
        """Close this connection for good; what waits in it is dropped."""
        self._outbound.discard(outbound)
        with outbound.lock:
            outbound.closed = True
            self._drop(outbound.leave(outbound.card))

    def write_on(self, outbound: Outbound, *, here: bool = True) -> None:
        """Write the rest in the network thread when there is room for it, or no longer do so. The
        connection's lock is held."""
        if outbound.socket is not None:
            self._selector.modify(outbound.socket, READ | WRITE if here else READ, outbound)

    def broke(self, outbound: Outbound) -> None:
        """Writing to this connection failed; its lock is held."""
        self._drop(outbound.lose())
        self._order(outbound, REDIAL)

    def close(self) -> None:
        """Once all connections are hung up."""
        self._closed = True
        self._wake()
        self._thread.join(HANDSHAKE)

    def _order(self, outbound: Outbound, seconds: float) -> None:
        self._orders.append((monotonic() + seconds, outbound))
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
                    self._attend_to(key, events)
                self._follow_orders()
                self._look_at_the_time()
            except Exception:  # a defect: the other connections need this thread all the same
                log.exception("the network thread of rank %d goes on after an error", self.rank)
                sleep(REDIAL)
        for caller in self._callers:
            caller.socket.close()
        for dialing in self._dialing.values():
            dialing.socket.close()
        self._close_sockets()

    def _attend_to(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._woken:
            with suppress(OSError):
                self._woken.recv(4096)
        elif isinstance(key.data, Outbound):
            self._go_on(key.data, events)
        elif isinstance(key.data, _Caller) and key.data in self._callers:  # still
            self._hear(key.data)
        elif isinstance(key.data, _Dialing) and key.data in self._dialing.values():
            self._shake_hands(key.data)

    def _close_sockets(self) -> None:
        self._selector.close()
        for end in (self._woken, self._waker, self._listener):
            end.close()

    def _seconds(self) -> float | None:
        """How long there may be nothing to do."""
        now = monotonic()
        if any(caller.looked_up is not None for caller in self._callers):
            return LOOK_UP
        oldest = next(iter(self._callers), None)
        times = [when for when, _ in tuple(self._orders)]
        times += [self._looks] if self._outbound else []
        times += [dialing.deadline for dialing in self._dialing.values()]
        if oldest is not None:
            times.append(oldest.deadline)
        return max(0.0, min(times) - now) if times else None

    def _follow_orders(self) -> None:
        for _ in range(len(self._orders)):
            when, outbound = self._orders.popleft()
            if when > monotonic():
                self._orders.append((when, outbound))
            elif not outbound.closed:
                self._call(outbound)

    def _look_at_the_time(self) -> None:
        now = monotonic()
        for dialing in [d for d in self._dialing.values() if d.deadline <= now]:
            self._failed(dialing)
        for caller in list(self._callers):
            if caller.looked_up is not None and caller.looked_up.done():
                self._let_in_as_in_store(caller, caller.looked_up)
            elif caller.deadline <= now:
                self._turn_away(caller, Refusal.UNFINISHED)
            elif caller.looked_up is None:
                break  # the others came later
        if now >= self._looks:
            self._looks = now + LOOK
            for outbound in tuple(self._outbound):
                self._look_after(outbound)

    def _look_after(self, outbound: Outbound) -> None:
        """A host that is cut off says nothing: its connections break when it doesn't answer."""
        with outbound.lock:
            if outbound.socket is None or answers(outbound.socket):
                return
            self.broke(outbound)
        self._news()

    def _go_on(self, outbound: Outbound, events: int) -> None:
        """A connection that stands has room, or was closed by the other end."""
        with outbound.lock:
            if outbound.socket is None:
                return
            try:
                if events & READ and not _is_open(outbound.socket):
                    raise ConnectionResetError
                if outbound.flush() and events & WRITE:
                    self._selector.modify(outbound.socket, READ, outbound)
            except OSError:
                self.broke(outbound)
                tells = True
            else:
                tells, outbound.awaited = outbound.awaited, False
        if tells:
            self._news()

    # Connections that this rank opens

    def _call(self, outbound: Outbound) -> None:
        former = self._dialing.pop(outbound, None)
        if former is not None:
            self._drop(former.socket)
        with outbound.lock:
            card = outbound.card
            if outbound.socket is not None:
                return
        host, _, port = card.endpoint.removeprefix("tcp://").rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            hello = Hello(self._identity, card)
            connection = socket.socket(family, socket.SOCK_STREAM)
        except (ValueError, OSError):  # a key on a card that is none, or no free descriptor
            self._fail(outbound, card)
            return
        prepare(connection)
        dialing = _Dialing(outbound, card, connection, monotonic() + NO_ANSWER, hello)
        self._dialing[outbound] = dialing
        try:
            with suppress(BlockingIOError):
                connection.connect((host, int(port)))
        except OSError:  # also one that cannot be resolved
            self._failed(dialing)
        else:
            self._selector.register(connection, WRITE, dialing)

    def _shake_hands(self, dialing: _Dialing) -> None:
        connection = dialing.socket
        try:
            if not dialing.said:
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, "cannot connect")
                connection.send(dialing.hello.text)  # a new socket has room for it
                dialing.said = True
                dialing.deadline = monotonic() + HANDSHAKE
                self._selector.modify(connection, READ, dialing)
                return
            came = connection.recv(REPLY_NBYTES - len(dialing.reply))
            if not came:
                raise ConnectionResetError
            dialing.reply += came
            if len(dialing.reply) == REPLY_NBYTES:
                self._came_up(dialing, dialing.hello.finish(bytes(dialing.reply)))
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._failed(dialing)

    def _came_up(self, dialing: _Dialing, cipher: RecordCipher | None) -> None:
        outbound, connection = dialing.outbound, dialing.socket
        del self._dialing[outbound]
        with outbound.lock:
            if outbound.closed or outbound.card != dialing.card:
                self._drop(connection)
                return
            outbound.up(connection, cipher)
            self._selector.modify(connection, READ, outbound)
            try:
                if not outbound.flush():
                    self.write_on(outbound)
            except OSError:
                self.broke(outbound)
            outbound.awaited = False
        self._news()

    def _failed(self, dialing: _Dialing) -> None:
        del self._dialing[dialing.outbound]
        self._drop(dialing.socket)
        self._fail(dialing.outbound, dialing.card)

    def _fail(self, outbound: Outbound, card: Card) -> None:
        """It cannot be opened to where this card says, which is no news of where it is now."""
        with outbound.lock:
            if not outbound.closed and outbound.card == card:
                self.broke(outbound)
        self._news()

    # Connections that others open

    def _accept(self) -> None:
        try:
            while True:
                connection, _ = self._listener.accept()
                prepare(connection)
                caller = _Caller(connection, monotonic() + HANDSHAKE)
                self._callers[caller] = None
                self._selector.register(connection, READ, caller)
                if len(self._callers) > BACKLOG:
                    self._turn_away(next(iter(self._callers)), Refusal.UNFINISHED)
        except BlockingIOError:
            pass
        except OSError:  # no descriptor is free: this is tried again at once otherwise
            sleep(REDIAL)

    def _hear(self, caller: _Caller) -> None:
        if caller.looked_up is not None:  # it says more before it has an answer, or has gone
            self._turn_away(caller, Refusal.STRANGER)
            return
        try:
            came = caller.socket.recv(caller.wanted - len(caller.hello))
        except BlockingIOError:
            return
        except OSError:
            came = b""
        caller.hello += came
        if not came:
            strange = bool(caller.hello) and not MAGIC.startswith(caller.hello[: len(MAGIC)])
            self._turn_away(caller, Refusal.STRANGER if strange else Refusal.UNFINISHED)
        elif len(caller.hello) == caller.wanted:
            if caller.wanted > PREFIX.size:
                self._judge(caller)
                return
            magic, version, nbytes = PREFIX.unpack(caller.hello)
            if magic != MAGIC or not 0 < nbytes <= HELLO_NBYTES:
                self._turn_away(caller, Refusal.STRANGER)
            elif version != VERSION:
                self._turn_away(caller, Refusal.MALFORMED)
            else:
                caller.wanted += nbytes

    def _judge(self, caller: _Caller) -> None:
        """All of the hello is there."""
        hello = bytes(caller.hello)
        card = caller.card = sender_of(self._identity, hello)
        if card is None:
            self._turn_away(caller, Refusal.FORGED)
            return
        try:
            caller.reply, caller.cipher = answered(self._identity, hello, card)
        except ValueError:
            self._turn_away(caller, Refusal.STRANGER)
            return
        # Only those who know this rank's card from the store get as far as a question to it.
        believes_store = self.protection.secret is None and self.protection.encrypted
        if believes_store and self._known.get(card.rank) != card:
            self._ask_for_card(caller, card.rank)
        else:
            self._let_in(caller, card)

    def _ask_for_card(self, caller: _Caller, rank: int) -> None:
        name = self._sealer.key_of(rank)
        try:
            caller.looked_up = self._line.begin(lambda store: _get(store, name))
        except RunError:
            self._turn_away(caller, Refusal.UNFINISHED)

    def _let_in_as_in_store(self, caller: _Caller, looked_up: Future[bytes]) -> None:
        try:
            card = self._sealer.read(looked_up.result())
        except RuntimeError:  # torch's DistError is one
            self._turn_away(caller, Refusal.UNFINISHED)
            return
        if card is None or card != caller.card:
            self._turn_away(caller, Refusal.STRANGER)
            return
        self._known[card.rank] = card
        self._let_in(caller, card)

    def _let_in(self, caller: _Caller, card: Card) -> None:
        try:
            caller.socket.send(caller.reply)  # a new socket has room for it
        except OSError:
            self._turn_away(caller, Refusal.UNFINISHED)
            return
        del self._callers[caller]
        self._selector.unregister(caller.socket)
        self._admit(caller.socket, card.rank, caller.cipher)

    def _turn_away(self, caller: _Caller, why: Refusal) -> None:
        del self._callers[caller]
        self._drop(caller.socket)
        self.refused.count(why)

    def _publish(self, store: Store) -> None:
        store.set(self._sealer.key_of(self.rank), self.text.decode())


def _listening(rank: int, host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise TransportError(
            f"rank {rank} can't listen on {host}: {error.strerror or error}", "name another address"
        ) from None


def _is_open(connection: socket.socket) -> bool:
    """The other end says nothing after the handshake: what can be read is its end."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    return False


def _get(store: Store, name: str) -> bytes:
    """What the store has under this name; empty if there is nothing."""
    return store.get(name) if store.check([name]) else b""

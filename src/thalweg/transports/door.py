"""A rank's door: where it listens, whom it lets in, and how it finds and reaches the others.

Every door has a key pair of its own, made when it is. Its public half stands on the card that goes
into the store, and both sides of a connection must have the private half of what their card says.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress

import zmq

from thalweg.errors import NotTrusted, RunError
from thalweg.transports.card import Card
from thalweg.transports.connection import Connection, Keys, listen
from thalweg.transports.framing import frame_nbytes
from thalweg.transports.gate import Gate
from thalweg.transports.line import Line, Store
from thalweg.transports.protection import Protection
from thalweg.transports.refusal import Refusal, Tally


class Door:
    """`purpose` keeps the cards of different transports apart in one store."""

    def __init__(
        self,
        rank: int,
        store: Store,
        host: str,
        *,
        purpose: str,
        queue: int,
        protection: Protection | None = None,
    ) -> None:
        self.rank = rank
        self.protection = protection or Protection(refused=Tally(rank))
        self.refused = self.protection.refused
        self.frame = frame_nbytes(curve=self.protection.curve)
        self._queue = queue
        self._sealer = self.protection.sealer(purpose)
        self._keys = Keys.fresh() if self.protection.curve else None
        self._line = Line(store, rank)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._gate = Gate(self._context, self.refused, self._look_up, curve=self.protection.curve)
        self.inbound, endpoint = listen(
            self._context, rank, host, queue, self.frame, self._keys, before=self._gate.watch
        )
        key = b"" if self._keys is None else self._keys.public
        self.card = Card(rank=rank, endpoint=endpoint, key=key)
        self.text = self._sealer.write(self.card)
        try:
            self._publish(store)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._gate.open()

    def meet_at(self, store: Store) -> None:
        """Find others in this store from now on, and be found there; RunError if it doesn't
        answer."""
        line = Line(store, self.rank)
        line.ask(self._publish)
        self._line = line

    def find(self, peer: int) -> Card | None:
        """Its card; None if there is none, or no store. NotTrusted if it isn't of one of us."""
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
                f"this job's secret, or one with CURVE {self.protection.mode}",
                "start all workers with the same THALWEG_SECRET and THALWEG_CURVE",
            )
        return card

    def trusted(self, text: bytes, peer: int) -> Card | None:
        """The card that this is, if it is this peer's."""
        card = self._sealer.read(text)
        if card is None or card.rank != peer:
            self.refused.count(Refusal.FORGED)
            return None
        self._gate.know(card)
        return card

    def connect(self, card: Card) -> Connection:
        return Connection(self._context, card, self._queue, self._keys)

    def speaks_for(self, frame: zmq.Frame, sender: int) -> bool:
        """Whether the connection that this came by is the sender's."""
        return not self.protection.curve or frame.get("User-Id") == str(sender)

    def close(self) -> None:
        """Once all connections are closed; what was sent last may leave, for a moment."""
        self.inbound.close(linger=0)
        self._context.term()

    def _publish(self, store: Store) -> None:
        if self.card.key:  # first, so that who is found is also let in
            store.set(self._sealer.key_by(self.card.key), self.text)
        store.set(self._sealer.key_of(self.rank), self.text)

    def _look_up(self, keys: list[bytes]) -> Future[list[Card | None]]:
        def look_up(store: Store) -> list[Card | None]:
            found = []
            for key in keys:
                text = _get(store, self._sealer.key_by(key))
                card = self._sealer.read(text) if text else None
                found.append(card if card is not None and card.key == key else None)
            return found

        return self._line.begin(look_up)


def _get(store: Store, name: str) -> bytes:
    """Empty if it isn't there."""
    return store.get(name) if store.check([name]) else b""

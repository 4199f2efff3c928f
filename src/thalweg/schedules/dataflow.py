"""Which move waits for which: the order of a rank's list, chunk by chunk.

Every reader of a schedule that goes through time (the drawing, the simulator, the run) follows
this order, so that what is drawn and priced is what is run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from thalweg.schedules.moves import Kind, Move
from thalweg.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Order:
    moves: tuple[Move, ...]
    waits: tuple[int, ...]  # for how many earlier moves each one waits
    frees: tuple[tuple[int, ...], ...]  # which later moves wait for it


def order(moves: Iterable[Move]) -> Order:
    listed = tuple(moves)
    latest: dict[int, int] = {}  # chunk -> the last move that touched it
    waits, frees = [], [list[int]() for _ in listed]
    for index, move in enumerate(listed):
        span = range(move.start, move.stop)
        before = {latest[chunk] for chunk in span if chunk in latest}
        waits.append(len(before))
        for earlier in before:
            frees[earlier].append(index)
        latest.update(dict.fromkeys(span, index))
    return Order(listed, tuple(waits), tuple(map(tuple, frees)))


class Message(NamedTuple):
    source: int
    target: int
    start: int
    stop: int


class Arrow(NamedTuple):
    """A message in time, and what its receiver does with it."""

    message: Message
    kind: Kind


def beats(schedule: Schedule) -> list[list[Arrow]]:
    """The schedule in time, if every message takes one beat and every rank sends at most one and
    receives at most one in it. Their number is the length of the longest sequence of moves."""
    hands = {rank: _Hand(schedule, rank) for rank in schedule.ranks}
    drawn: list[list[Arrow]] = []
    while True:
        taking: set[int] = set()
        sent = []
        for hand in hands.values():
            message = hand.send_one(taking)
            if message is not None:
                taking.add(message.target)
                sent.append(message)
        if not sent:
            return drawn
        drawn.append([Arrow(m, hands[m.target].purpose(m)) for m in sent])
        for message in sent:
            hands[message.target].take(message)


class _Hand:
    """One rank on its way through its moves."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.rank = rank
        self.order = order(schedule.moves(rank))
        self.waits = list(self.order.waits)
        self.purposes = self._purposes()
        self.arrived: Counter[Message] = Counter()
        self.sends: list[int] = []
        self.receives: list[int] = []
        self._start([index for index, waits in enumerate(self.waits) if not waits])

    def send_one(self, busy: set[int]) -> Message | None:
        """The earliest send that is ready and whose receiver is free."""
        put_off = []
        message = None
        while self.sends and message is None:
            index = heappop(self.sends)
            move = self.order.moves[index]
            if move.peer in busy:
                put_off.append(index)
            else:
                message = Message(self.rank, move.peer, move.start, move.stop)
                self._done(index)
        self.sends += put_off
        heapify(self.sends)
        return message

    def purpose(self, message: Message) -> Kind:
        """What this rank does with the next such message."""
        return self.purposes[message].popleft()

    def take(self, message: Message) -> None:
        self.arrived[message] += 1
        self._receive()

    def _purposes(self) -> dict[Message, deque[Kind]]:
        purposes: dict[Message, deque[Kind]] = {}
        for move in self.order.moves:
            if move.kind is not Kind.SEND:
                for peer in (move.peer,) if move.quorum is None else move.quorum.peers:
                    purposes.setdefault(self._answer(move, peer), deque()).append(move.kind)
        return purposes

    def _receive(self) -> None:
        ready = [index for index in self.receives if self._answered(self.order.moves[index])]
        for index in ready:
            self.receives.remove(index)
            move = self.order.moves[index]
            if move.quorum is None:
                self.arrived[self._answer(move, move.peer)] -= 1
            self._done(index)

    def _answered(self, move: Move) -> bool:
        if move.quorum is None:
            return self.arrived[self._answer(move, move.peer)] > 0
        members = enumerate(move.quorum.peers)
        arrived = {m for m, p in members if p == self.rank or self.arrived[self._answer(move, p)]}
        return move.quorum.code.decode(frozenset(arrived)) is not None

    def _answer(self, move: Move, peer: int) -> Message:
        return Message(peer, self.rank, move.start, move.stop)

    def _done(self, index: int) -> None:
        freed = []
        for later in self.order.frees[index]:
            self.waits[later] -= 1
            if not self.waits[later]:
                freed.append(later)
        self._start(freed)

    def _start(self, indices: list[int]) -> None:
        for index in indices:
            if self.order.moves[index].kind is Kind.SEND:
                heappush(self.sends, index)
            else:
                self.receives.append(index)
        if any(self.order.moves[index].kind is not Kind.SEND for index in indices):
            self._receive()

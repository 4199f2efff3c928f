"""The dependencies between the moves of a rank, chunk by chunk.

A send waits for the earlier moves that change its chunks; what changes a chunk waits also for the
earlier sends of it. Sends don't wait for one another.

Every user of a schedule in time (the drawing, the simulator, the engine) follows this order, so
that the drawn and predicted schedule is the one that runs.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from thalweg.schedules.moves import Move, MoveKind
from thalweg.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Order:
    moves: tuple[Move, ...]
    waits: tuple[int, ...]  # for how many earlier moves each one waits
    frees: tuple[tuple[int, ...], ...]  # which later moves wait for it


def order(moves: Iterable[Move]) -> Order:
    listed = tuple(moves)
    changed: dict[int, int] = {}  # chunk -> the last move that changed it
    sent: dict[int, list[int]] = {}  # chunk -> its sends since then
    waits, frees = [], [list[int]() for _ in listed]
    for index, move in enumerate(listed):
        before: set[int] = set()
        for chunk in range(move.start, move.stop):
            if chunk in changed:
                before.add(changed[chunk])
            if move.kind.sends:
                sent.setdefault(chunk, []).append(index)
            else:
                before.update(sent.pop(chunk, ()))
                changed[chunk] = index
        waits.append(len(before))
        for earlier in before:
            frees[earlier].append(index)
    return Order(listed, tuple(waits), tuple(map(tuple, frees)))


class Progress:
    """The progress of one rank: `ready` are the moves that wait for nothing at the start."""

    def __init__(self, order: Order) -> None:
        self._frees = order.frees
        self._waits = list(order.waits)
        self.ready = [index for index, waits in enumerate(order.waits) if not waits]

    def done(self, index: int) -> list[int]:
        """The moves that may start now that this one is done."""
        freed = []
        for later in self._frees[index]:
            self._waits[later] -= 1
            if not self._waits[later]:
                freed.append(later)
        return freed


class Message(NamedTuple):
    source: int
    target: int
    start: int
    stop: int
    answer: bool = False  # to a quorum


class Arrow(NamedTuple):
    """A message in time, and the move that receives it."""

    message: Message
    kind: MoveKind


@dataclass(frozen=True, slots=True)
class SlotTimeline:
    """A schedule in time slots: every message takes one, in which every rank sends at most one and
    receives at most one.

    `sequential_moves` is the longest path of any one chunk, as if it were alone: the number of
    latencies that the literature counts, whatever the number of chunks.
    """

    slots: tuple[tuple[Arrow, ...], ...]
    sequential_moves: int


def timeline(schedule: Schedule) -> SlotTimeline:
    cursors = {rank: _RankCursor(schedule, rank) for rank in schedule.ranks}
    slots: list[tuple[Arrow, ...]] = []
    while True:
        busy: set[int] = set()
        sent: list[tuple[Message, int]] = []
        for cursor in sorted(cursors.values(), key=_RankCursor.next_chunk):  # oldest chunk first
            numbered = cursor.send_one(busy)
            if numbered is not None:
                busy.add(numbered[0].target)
                sent.append(numbered)
        if not sent:
            return SlotTimeline(tuple(slots), max(cursor.longest for cursor in cursors.values()))
        arrows = []
        for message, move_number in sent:
            kind = cursors[message.target].receive(message, move_number)
            arrows.append(Arrow(message, kind))
        slots.append(tuple(arrows))


class _RankCursor:
    """The position of one rank in its moves.

    The moves of a chunk are numbered along its path, as time slots of the chunk alone: a send is
    one later than its rank's last move of the chunk; a message is received when it is sent, or in
    the next slot that no earlier receive of the list takes for that chunk.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.rank = rank
        self.order = order(schedule.moves(rank))
        self.progress = Progress(self.order)
        self.receivers: dict[Message, deque[int]] = {}  # the moves that take each message
        for index, move in enumerate(self.order.moves):
            for message in () if move.kind.sends else self._answers(move):
                self.receivers.setdefault(message, deque()).append(index)
        # The move numbers of arrived messages by source, for each move.
        self.arrived: list[dict[int, int]] = [{} for _ in self.order.moves]
        self.last_move = [0] * len(schedule.sizes)
        self.receiving: set[tuple[int, int]] = set()  # (chunk, number): taken
        self.longest = 0
        self.sends: list[int] = []  # that are ready, the earliest first
        self.awaiting: set[int] = set()  # receives that only wait for messages
        self._start(self.progress.ready)

    def next_chunk(self) -> int:
        return self.order.moves[self.sends[0]].start if self.sends else 0

    def send_one(self, busy: set[int]) -> tuple[Message, int] | None:
        """The earliest send that is ready and whose receiver is free."""
        moves = self.order.moves
        index = next((index for index in self.sends if moves[index].peer not in busy), None)
        if index is None:
            return None
        self.sends.remove(index)
        kind, peer, start, stop, _ = moves[index]
        number = 1 + max(self.last_move[start:stop])
        self._done(index, number)
        return Message(self.rank, peer, start, stop, kind is MoveKind.ANSWER), number

    def receive(self, message: Message, number: int) -> MoveKind:
        """Take a message that has arrived; the kind of the move that receives it."""
        index = self.receivers[message].popleft()
        self.arrived[index][message.source] = number
        self._receive(index)
        return self.order.moves[index].kind

    def _receive(self, index: int) -> None:
        """Do a receive if it waits for messages only, and enough of them have arrived."""
        move, arrived = self.order.moves[index], self.arrived[index]
        if index not in self.awaiting or not arrived:
            return
        if move.quorum is not None:
            there = {*arrived, self.rank}
            members = frozenset(m for m, peer in enumerate(move.quorum.peers) if peer in there)
            if move.quorum.code.decode(members) is None:
                return
        self.awaiting.remove(index)
        numbers = [self._receiving_slot(move, number) for number in sorted(arrived.values())]
        self._done(index, max(*numbers, *self.last_move[move.start : move.stop]))

    def _answers(self, move: Move) -> list[Message]:
        if move.quorum is None:
            return [Message(move.peer, self.rank, move.start, move.stop)]
        others = [peer for peer in move.quorum.peers if peer != self.rank]
        return [Message(peer, self.rank, move.start, move.stop, answer=True) for peer in others]

    def _receiving_slot(self, move: Move, number: int) -> int:
        chunks = range(move.start, move.stop)
        while any((chunk, number) in self.receiving for chunk in chunks):
            number += 1
        self.receiving.update((chunk, number) for chunk in chunks)
        return number

    def _done(self, index: int, number: int) -> None:
        """Note the number of a move, and start those that waited for it."""
        move = self.order.moves[index]
        self.last_move[move.start : move.stop] = [number] * (move.stop - move.start)
        self.longest = max(self.longest, number)
        self._start(self.progress.done(index))

    def _start(self, indices: list[int]) -> None:
        for index in indices:
            if self.order.moves[index].kind.sends:
                insort(self.sends, index)
            else:
                self.awaiting.add(index)
                self._receive(index)

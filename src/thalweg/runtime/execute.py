"""Run a schedule: one rank's moves, on a transport.

Moves start as soon as the earlier ones that share a chunk with them are done (`dataflow.order`),
so chunks are in flight in both directions while others wait. Sums are taken in the order of the
list, whatever the order of arrival: the result doesn't depend on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from time import monotonic

from thalweg.schedules import Kind, Move, Progress, Quorum, Schedule, order
from thalweg.transports import Address, Array, Label, Transport

View = Callable[[int, int], Array]
"""From a span of chunks to the writable array that holds it on this rank."""


def flat(schedule: Schedule, vector: Array) -> View:
    """Chunks one after the other in one vector, as all all-reduces have them."""
    offsets = schedule.offsets
    return lambda start, stop: vector[offsets[start] : offsets[stop]]


def execute(
    schedule: Schedule, transport: Transport, view: View, *, round_number: int, timeout: float
) -> None:
    """Do all moves of this rank, in place; PeerLate if they take longer than `timeout` seconds."""
    _Execution(schedule, transport, view, round_number, monotonic() + timeout).run()


class _Execution:
    def __init__(
        self,
        schedule: Schedule,
        transport: Transport,
        view: View,
        round_number: int,
        deadline: float,
    ) -> None:
        self.transport = transport
        self.view = view
        self.round_number = round_number
        self.deadline = deadline
        self.order = order(schedule.moves(transport.rank))
        self.progress = Progress(self.order)
        self.ready = self.progress.ready  # a heap: the list's order is the priority
        self.awaited: dict[Address, deque[int]] = {}
        self.answers: dict[int, dict[int, Array]] = {}  # to a quorum, by member

    def run(self) -> None:
        while self.ready or self.awaited:
            while self.ready:
                self._start(heappop(self.ready))
            if self.awaited:
                self._arrive(*self.transport.receive_any(self.awaited.keys(), self.deadline))

    def _start(self, index: int) -> None:
        move = self.order.moves[index]
        if move.kind is Kind.SEND:
            array = self.view(move.start, move.stop)
            self.transport.send(move.peer, self._label(move), array)
            self._done(index)
        elif move.quorum is None:
            self._await(move.peer, move, index)
        else:
            self.answers[index] = {}
            for peer in move.quorum.peers:
                if peer != self.transport.rank:
                    self._await(peer, move, index)
            self._try_decode(index, move, move.quorum)

    def _arrive(self, address: Address, array: Array) -> None:
        queue = self.awaited[address]
        index = queue.popleft()
        if not queue:
            del self.awaited[address]
        move = self.order.moves[index]
        if move.quorum is not None:
            self.answers[index][move.quorum.peers.index(address.peer)] = array
            self._try_decode(index, move, move.quorum)
            return
        target = self.view(move.start, move.stop)
        if move.kind is Kind.ADD:
            target += array
        else:
            target[:] = array
        self._done(index)

    def _try_decode(self, index: int, move: Move, quorum: Quorum) -> None:
        answers = self.answers[index]
        target = self.view(move.start, move.stop)
        if self.transport.rank in quorum.peers:
            answers[quorum.peers.index(self.transport.rank)] = target
        weights = quorum.code.decode(frozenset(answers))
        if weights is None:
            return
        terms = [answers[member] * weight for member, weight in sorted(weights.items())]
        total = sum(terms[1:], start=terms[0])
        if self.transport.rank in quorum.peers:
            target[:] = total
        else:
            target += total
        del self.answers[index]
        for peer in quorum.peers:
            self.awaited.pop(Address(peer, self._label(move)), None)
        self._done(index)

    def _await(self, peer: int, move: Move, index: int) -> None:
        self.awaited.setdefault(Address(peer, self._label(move)), deque()).append(index)

    def _label(self, move: Move) -> Label:
        return Label(self.round_number, move.start, move.stop)

    def _done(self, index: int) -> None:
        for later in self.progress.done(index):
            heappush(self.ready, later)

"""Run a schedule: one rank's moves, on a transport.

Moves start as soon as the earlier ones that share a chunk with them are done (`dataflow.order`),
so chunks are in flight in both directions while others wait. Sums are taken in the order of the
list, whatever the order of arrival: the result doesn't depend on timing. A chunk that was sent is
not changed before its message has left.

Every message is awaited. A schedule with quorums, which tolerates missing ones, is run by a `Node`.

Groups that change from step to step use a handshake: a rank sends to a peer after that peer has
signalled that it is ready, and finishes after all peers have acknowledged its messages. Otherwise
an early rank fills a link that the peer's previous group still needs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import takewhile
from time import monotonic

import numpy as np

from thalweg.engine.arithmetic import NUMPY, Arithmetic
from thalweg.errors import ScheduleError, TransportError
from thalweg.schedules import Move, MoveKind, Order, Schedule, order
from thalweg.transports import SENT, Address, Array, Label, Landing, Sending, Transport

READY_SIGNAL_SPAN, THERE_SIGNAL_SPAN = 0, 1  # empty spans label the signals of the handshake
SIGNAL_PAYLOAD = np.zeros(1, np.uint8)
View = Callable[[int, int], Array]
"""Maps a span of chunks to the writable array that holds it on this rank."""


@dataclass(frozen=True, slots=True)
class RankProgram:
    """One rank's moves of a schedule and their dependencies, compiled once, run at every step."""

    schedule: Schedule
    rank: int
    order: Order
    handshake: bool = False
    leading: Mapping[int, int] = field(default_factory=dict)  # see `Leading`
    repeated: frozenset[tuple[int, int, int]] = (
        frozenset()
    )  # (peer, start, stop) received repeatedly

    @classmethod
    def of(cls, schedule: Schedule, rank: int, *, handshake: bool = False) -> RankProgram:
        moves = order(schedule.moves(rank))
        incoming = [move for move in moves.moves if move.kind is not MoveKind.SEND]
        counts = Counter((move.peer, move.start, move.stop) for move in incoming)
        peers = {move.peer for move in incoming} if handshake else set()
        return cls(
            schedule,
            rank,
            moves,
            handshake,
            {peer: _leading(schedule, peer, rank) for peer in peers},
            frozenset(key for key, count in counts.items() if count > 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One round on one vector, which is reduced in place. `view` locates the chunks if they aren't
    contiguous in the vector."""

    program: RankProgram
    vector: Array
    step: int
    round_number: int
    bucket: int = 0
    arithmetic: Arithmetic = NUMPY
    view: View | None = None


@dataclass(slots=True)
class Leading:
    """The messages of a peer that only the link to it can delay, from the first arrival to the
    last: those that the peer sends without waiting for others, once this rank has signalled that
    it is ready; in a pair, all messages.
    """

    began: float
    ended: float
    nbytes: int = 0  # without the first message


def _leading(schedule: Schedule, peer: int, rank: int) -> int:
    """The number of messages from `peer` that only the link can delay."""
    if len(schedule.ranks) == 2:
        return sum(move.kind is MoveKind.SEND for move in schedule.moves(peer))
    at_once = takewhile(lambda move: move.kind is MoveKind.SEND, schedule.moves(peer))
    return sum(move.peer == rank for move in at_once)


def flat(schedule: Schedule, vector: Array) -> View:
    """A view of contiguous chunks in one vector, as in every all-reduce."""
    offsets = schedule.offsets
    if len(vector) != offsets[-1]:
        raise TransportError(
            f"{schedule.name} is for {offsets[-1]} elements, and there are {len(vector)}",
            "build it for this tensor",
        )
    return lambda start, stop: vector[offsets[start] : offsets[stop]]


class Execution:
    """The progress of one rank in one round, from `start_ready` and `arrive` until all is done."""

    def __init__(self, task: Task, transport: Transport, deadline: float) -> None:
        self.task = task
        self.transport = transport
        self.deadline = deadline
        self.started = monotonic()
        self.round = task.step, task.round_number  # in the labels of its messages
        self.view = task.view or flat(task.program.schedule, task.vector)
        self.order = task.program.order
        self.waits = list(self.order.waits)
        # The moves that may start, as a heap: earlier ones have priority.
        self.ready = [index for index, waits in enumerate(self.waits) if not waits]
        self.awaited: dict[Address, deque[int]] = {}
        self.leaving: dict[int, list[Sending]] = {}  # sends that must end before a move writes
        self.sendings: list[Sending] = []
        self.came: dict[int, float] = {}
        self.leading: dict[int, Leading] = {}
        self._landings: dict[Address, Landing] = {}  # of partly received messages
        self._expected = dict(task.program.leading)
        self._waiting_sends: dict[int, deque[int]] = {}  # by peer that isn't ready
        self._left: Counter[int] = Counter()  # messages to come, by peer
        if task.program.handshake:
            self._shake_hands()

    def _shake_hands(self) -> None:
        """Signal to every peer that will send to this rank that it is ready."""
        for move in self.order.moves:
            if move.kind is MoveKind.SEND:
                self._waiting_sends.setdefault(move.peer, deque())
            else:
                self._left[move.peer] += 1
        for peer in self._left:
            self._signal(peer, READY_SIGNAL_SPAN)
        for peer in self._waiting_sends:
            for signal in (READY_SIGNAL_SPAN, THERE_SIGNAL_SPAN):
                self.awaited[Address(peer, Label(*self.round, signal, signal))] = deque([-1])

    def _signal(self, peer: int, signal: int) -> None:
        label = Label(*self.round, signal, signal)
        self.sendings.append(self.transport.send(peer, label, SIGNAL_PAYLOAD, self.deadline))

    def _note(self, peer: int, nbytes: int) -> None:
        """Count a message that has arrived, and acknowledge the peer's last one."""
        if self._expected.get(peer):
            self._expected[peer] -= 1
            now = monotonic()
            lead = self.leading.setdefault(peer, Leading(now, now, -nbytes))
            lead.ended = now
            lead.nbytes += nbytes
        if peer in self._left:
            self._left[peer] -= 1
            if not self._left[peer]:
                self._signal(peer, THERE_SIGNAL_SPAN)

    def start_ready(self) -> bool:
        """Start every move whose dependencies are done; True if all moves are done."""
        while self.ready:
            index = heappop(self.ready)
            move = self.order.moves[index]
            if move.kind is MoveKind.SEND:
                if move.peer in self._waiting_sends:
                    self._waiting_sends[move.peer].append(index)
                else:
                    self._send(index, move)
            elif move.quorum is not None or move.kind is MoveKind.ANSWER:
                raise ScheduleError(f"{move} has a quorum", "run it with a Node and a Relay")
            else:
                address = Address(move.peer, Label(*self.round, move.start, move.stop))
                self.awaited.setdefault(address, deque()).append(index)
        return not self.awaited

    def wait_for_sendings(self) -> None:
        """Wait until the vector may be changed."""
        for sending in self.sendings:
            sending.wait(self.deadline)

    def _send(self, index: int, move: Move) -> None:
        label, array = Label(*self.round, move.start, move.stop), self.view(move.start, move.stop)
        sending = self.transport.send(move.peer, label, array, self.deadline)
        if sending is not SENT:
            self.sendings.append(sending)
            for later in self.order.frees[index]:
                self.leaving.setdefault(later, []).append(sending)
        self._done(index)

    def arrive(self, address: Address, array: Array) -> None:
        """Complete the move that awaits this message."""
        if address.label.start == address.label.stop:  # the peer is ready, or has received all
            del self.awaited[address]
            if address.label.start == READY_SIGNAL_SPAN:
                for index in self._waiting_sends.pop(address.peer):
                    self._send(index, self.order.moves[index])
            return
        self.came.setdefault(address.peer, monotonic())
        queue = self.awaited[address]
        index = queue.popleft()
        if not queue:
            del self.awaited[address]
        landing = self._landings.pop(address, None)
        if landing is None:
            self._take(index, address, array)
        elif landing.array is not array:
            raise TransportError(
                f"rank {self.task.program.rank} received a part of a message from rank "
                f"{address.peer} twice (step {self.task.step}, round {self.task.round_number})",
                "check the connection between these two ranks",
            )
        self._note(address.peer, array.nbytes)
        self._done(index)

    def _take(self, index: int, address: Address, array: Array) -> None:
        """Apply a message that was received into another buffer."""
        move = self.order.moves[index]
        for sending in self.leaving.pop(index, ()):
            sending.wait(self.deadline)
        target = self.view(move.start, move.stop)
        if array.nbytes != target.nbytes:
            raise TransportError(
                f"rank {self.task.program.rank} expected {target.nbytes} bytes from rank "
                f"{address.peer} at step {self.task.step}, round {self.task.round_number}, and got "
                f"{array.nbytes}",
                "give all ranks the same model and plan",
            )
        incoming = array if array.dtype == target.dtype else array.view(target.dtype)
        if move.kind is MoveKind.ADD:
            self.task.arithmetic.add(target, incoming)
        else:
            target[:] = incoming

    def landing(self, address: Address, nbytes: int) -> Landing | None:
        """The place where an awaited message may be copied or added while it arrives; None if it
        has to be buffered."""
        peer, label = address
        queue = self.awaited.get(address)
        if queue is None or label.start == label.stop or address in self._landings:
            return None
        if (peer, label.start, label.stop) in self.task.program.repeated:
            return None
        if not all(sending.done for sending in self.leaving.get(queue[0], ())):
            return None
        target = self.view(label.start, label.stop)
        if target.nbytes != nbytes or not nbytes or not target.flags.c_contiguous:
            return None
        raw = target.reshape(-1).view(np.uint8)
        if self.order.moves[queue[0]].kind is not MoveKind.ADD:
            landing = Landing(raw)
        else:
            dtype, arithmetic = target.dtype, self.task.arithmetic

            def add(at: int, piece: memoryview) -> None:
                part = raw[at : at + len(piece)].view(dtype)
                arithmetic.add(part, np.frombuffer(piece, dtype))

            landing = Landing(raw, add)
        self._landings[address] = landing
        return landing

    def _done(self, index: int) -> None:
        for later in self.order.frees[index]:
            self.waits[later] -= 1
            if not self.waits[later]:
                heappush(self.ready, later)

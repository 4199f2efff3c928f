"""The execution of a schedule on simulated links: its moves compiled, and one run of them.

*Compiled*: each rank's moves, their prerequisites, and the receive that takes each message. The
order of a rank's moves is that of `dataflow.order`. A receive has one more prerequisite, its
message: the k-th message of a span from one rank to another is taken by the k-th receive of that
span there. A move without prerequisites waits for its rank to start.

In a schedule with quorums nobody waits for stragglers (as in `engine.tree_node`): once the result
of a chunk is decoded or received from above, the rank's other moves of that chunk are omitted, even
if the rank itself hasn't started.

*Run*: each rank starts at its own time, and moves when it can. A rank ends when all its moves are
done and its last byte has left: others may still wait for that byte, but the rank's buffer may
change.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from thalweg.declarations import Code
from thalweg.errors import ScheduleError
from thalweg.facts import grouped
from thalweg.schedules import Move, MoveKind, Quorum, Schedule, order

NO_SEND_TARGET = -1  # target of a move that isn't a send
NO_RECEIVER = 1 << 62  # of a message without a receive
MAX_CACHED_RANK_CHUNKS = 100_000  # ranks times chunks of a cached schedule
Numbers: TypeAlias = "array[int]"  # a large schedule has millions of moves
_SEND, _ANSWER = MoveKind.SEND, MoveKind.ANSWER  # looked up often
SimulatedSend = Callable[[int, int, int, Callable[[int], None], int, Callable[[], None]], None]
"""Source, target, bytes; the function to call when the target has received the message, and its
argument; the function to call when the last byte has left."""
MOVE_OMITTED = -1  # in place of a move's number of prerequisites


@dataclass(slots=True, kw_only=True)
class CompiledRank:
    """The moves of one rank by number. `received_by` is the move of the target that a message
    frees, or the complement of an index in its `answers`."""

    waits: Numbers  # prerequisites
    frees: list[tuple[int, ...]]
    first: list[int]  # moves that the rank's start frees
    targets: Numbers
    sizes: Numbers  # bytes of a send
    received_by: Numbers
    answers: list[tuple[int, int]] = field(default_factory=list)  # a quorum's move, and a member
    quorums: dict[int, Quorum] = field(default_factory=dict)
    counted: dict[int, frozenset[int]] = field(default_factory=dict)  # members, by quorum's move
    overtakes: dict[int, list[int]] = field(default_factory=dict)


def compiled_ranks(schedule: Schedule) -> dict[int, CompiledRank]:
    """The compiled ranks. Small schedules are cached, since an advisor simulates them often."""
    small = len(schedule.ranks) * len(schedule.sizes) <= MAX_CACHED_RANK_CHUNKS
    return _cached(schedule) if small else _compiled(schedule)


def _numbers(values: Iterable[int] = ()) -> Numbers:
    return array("q", values)


@dataclass(slots=True)
class _PairMessages:
    """The messages from one rank to another: their spans, each as one number, and their moves."""

    spans: Numbers = field(default_factory=_numbers)
    moves: Numbers = field(default_factory=_numbers)

    def add(self, span: int, move: int) -> None:
        self.spans.append(span)
        self.moves.append(move)


# By the other rank, or its complement for answers.
_MessagesByPair = defaultdict[int, _PairMessages]


def _compiled(schedule: Schedule) -> dict[int, CompiledRank]:
    compiled: dict[int, CompiledRank] = {}
    sent: dict[int, _MessagesByPair] = {}
    received: dict[int, _MessagesByPair] = {}
    # Ranks that do the same with other chunks share what their moves free.
    patterns: dict[bytes, tuple[Numbers, list[tuple[int, ...]], list[int]]] = {}
    for rank in schedule.ranks:
        moves = tuple(schedule.moves(rank))
        key = _pattern_key(moves)
        if key not in patterns:
            steps = order(moves)
            first = [index for index, waits in enumerate(steps.waits) if not waits]
            waits = _numbers(max(waits, 1) for waits in steps.waits)
            patterns[key] = waits, list(steps.frees), first
        waits, frees, first = patterns[key]
        compiled[rank] = part = CompiledRank(
            waits=waits[:],
            frees=frees,
            first=first,
            targets=_numbers([NO_SEND_TARGET]) * len(moves),
            sizes=_numbers([0]) * len(moves),
            received_by=_numbers([NO_RECEIVER]) * len(moves),
        )
        sent[rank], received[rank] = _addressed(schedule, rank, moves, part)
        if part.quorums or any(peer < 0 for peer in sent[rank]):
            _let_results_overtake(rank, moves, part)
    for source, by_target in sent.items():
        for target, messages in by_target.items():
            there = received[max(target, ~target)][source if target >= 0 else ~source]
            _match(messages, there, compiled[source].received_by)
    return compiled


_cached = lru_cache(maxsize=32)(_compiled)


def _pattern_key(moves: Sequence[Move]) -> bytes:
    """All that the order of these moves depends on: which are sends, and their chunks, numbered by
    first use."""
    names: dict[int, int] = {}
    name = names.setdefault
    key = _numbers()
    for kind, _, start, stop, _ in moves:
        sends = kind is _SEND or kind is _ANSWER
        if stop == start + 1:
            key.append(2 * name(start, len(names)) + sends)
        else:
            key.append(-2 * (stop - start) - sends)
            key.extend(name(chunk, len(names)) for chunk in range(start, stop))
    return key.tobytes()


def _addressed(
    schedule: Schedule, rank: int, moves: Sequence[Move], part: CompiledRank
) -> tuple[_MessagesByPair, _MessagesByPair]:
    """The messages sent by target, and received by source."""
    sent, received = _MessagesByPair(_PairMessages), _MessagesByPair(_PairMessages)
    offsets, itemsize, width = schedule.offsets, schedule.itemsize, len(schedule.sizes) + 1
    targets, sizes, waits = part.targets, part.sizes, part.waits
    for index, (kind, peer, start, stop, quorum) in enumerate(moves):
        span = start * width + stop
        if kind is _SEND or kind is _ANSWER:
            targets[index] = peer
            sizes[index] = (offsets[stop] - offsets[start]) * itemsize
            sent[peer if kind is _SEND else ~peer].add(span, index)
            continue
        waits[index] += 1
        if quorum is None:
            received[peer].add(span, index)
            continue
        part.quorums[index] = quorum
        own = frozenset(member for member, other in enumerate(quorum.peers) if other == rank)
        part.counted[index] = own
        waits[index] -= quorum.code.decode(own) is not None
        for member, other in enumerate(quorum.peers):
            if other != rank:
                received[~other].add(span, ~len(part.answers))
                part.answers.append((index, member))
    return sent, received


def _match(sent: _PairMessages, received: _PairMessages, received_by: Numbers) -> None:
    if sent.spans == received.spans:  # mostly messages are received in the order of sending
        for index, receive in zip(sent.moves, received.moves, strict=True):
            received_by[index] = receive
        return
    waiting = grouped(zip(received.spans, received.moves, strict=True))
    for span, indices in grouped(zip(sent.spans, sent.moves, strict=True)).items():
        for index, receive in zip(indices, waiting.get(span, ()), strict=False):
            received_by[index] = receive


def _let_results_overtake(rank: int, moves: Sequence[Move], part: CompiledRank) -> None:
    """Let the last gather of each chunk wait only for its message, or for enough answers; a
    member's own answer to it is a message to itself."""
    part.frees, part.first = part.frees.copy(), part.first.copy()  # shared with other ranks
    for indices in grouped((move.start, index) for index, move in enumerate(moves)).values():
        gathers = [index for index in indices if part.targets[index] == NO_SEND_TARGET]
        if not gathers:
            continue
        final = gathers[-1]
        before = [index for index in indices if index < final]
        freeing = [index for index in before if final in part.frees[index]]
        for index in freeing:
            part.frees[index] = tuple(later for later in part.frees[index] if later != final)
        part.first = [index for index in part.first if index != final]
        part.waits[final] = 1
        part.overtakes[final] = before
        if part.counted.get(final):
            before.append(_answer_oneself(rank, part, final, freeing))


def _answer_oneself(rank: int, part: CompiledRank, final: int, after: list[int]) -> int:
    [member] = part.counted[final]
    part.counted[final] = frozenset()
    own = len(part.waits)
    for index in after:
        part.frees[index] += (own,)
    if not after:
        part.first.append(own)
    part.waits.append(max(1, len(after)))
    part.frees.append(())
    part.targets.append(rank)
    part.sizes.append(0)
    part.received_by.append(~len(part.answers))
    part.answers.append((final, member))
    return own


class ScheduleRun:
    def __init__(
        self,
        schedule: Schedule,
        parts: Mapping[int, CompiledRank],
        send: SimulatedSend,
        slowdown: float,  # bytes count as many times
    ) -> None:
        self.schedule = schedule
        self.send = send
        self.slowdown = slowdown
        self._ended: dict[int, Callable[[], None]] = {}  # by the ranks that have started
        self.roles: dict[int, _RankRun] = {
            rank: _RankRun(self, rank, part) for rank, part in parts.items()
        }

    def start(self, rank: int, ended: Callable[[], None]) -> None:
        """Begin the moves of a rank now; `ended` is called at its end."""
        self._ended[rank] = ended
        role = self.roles[rank]
        if role.to_do:
            role.free(role.part.first)
        elif not role.leaving:
            ended()

    def end(self, rank: int) -> None:
        """Report the end of a rank, unless it hasn't started."""
        if rank in self._ended:
            self._ended[rank]()

    def refuse_to_hang(self) -> None:
        unended = [(rank, role) for rank, role in self.roles.items() if role.to_do]
        if len(self._ended) < len(self.roles) or not unended:
            return
        rank, role = unended[0]
        stuck = next(index for index, waits in enumerate(role.waits) if waits > 0)
        move = list(self.schedule.moves(rank))[stuck]
        raise ScheduleError(
            f"{self.schedule.name}: rank {rank} waits for a message that is never sent ({move})",
            "check the schedule: the topology's program is wrong",
        )


class _RankRun:
    """The progress of one rank."""

    __slots__ = ("_answered", "exchange", "leaving", "part", "rank", "to_do", "waits")

    def __init__(self, exchange: ScheduleRun, rank: int, part: CompiledRank) -> None:
        self.exchange = exchange
        self.rank = rank
        self.part = part
        self.waits = part.waits[:]
        self.to_do = len(part.waits)
        self.leaving = 0  # messages that have bytes left to send
        self._answered = dict(part.counted)  # members, by the quorum's move

    def arrived(self, number: int) -> None:
        """A message was received and handled."""
        if number < 0:
            self._answer(~number)
        elif number != NO_RECEIVER:
            self.free((number,))

    def free(self, moves: Sequence[int]) -> None:
        """Remove one prerequisite of these moves, and do what is ready in the schedule's order."""
        part, waits = self.part, self.waits
        ready: list[int] = []
        while True:
            for move in moves:
                waits[move] -= 1
                if not waits[move]:
                    ready.append(move)
            if not ready:
                return
            if len(ready) > 1:
                ready.sort(reverse=True)
            move = ready.pop()
            target = part.targets[move]
            if target != NO_SEND_TARGET:
                self._send(move, target)
            elif part.overtakes:
                self._omit(part.overtakes.get(move, ()))
            moves = part.frees[move]
            self.to_do -= 1
            if not self.to_do and not self.leaving:
                self.exchange.end(self.rank)

    def _left(self) -> None:
        self.leaving -= 1
        if not self.to_do and not self.leaving:
            self.exchange.end(self.rank)

    def _send(self, move: int, target: int) -> None:
        number = self.part.received_by[move]
        if target == self.rank:
            self._answer(~number)
            return
        exchange = self.exchange
        arrived = exchange.roles[target].arrived
        self.leaving += 1
        nbytes = round(exchange.slowdown * self.part.sizes[move])
        exchange.send(self.rank, target, nbytes, arrived, number, self._left)

    def _answer(self, number: int) -> None:
        """Count a member of a quorum; its move is freed when there are enough for the first
        time."""
        move, member = self.part.answers[number]
        code, there = self.part.quorums[move].code, self._answered[move]
        self._answered[move] = there | {member}
        if not _enough(code, there) and _enough(code, self._answered[move]):
            self.free((move,))

    def _omit(self, moves: Sequence[int]) -> None:
        for move in moves:
            if self.waits[move] > 0:
                self.waits[move] = MOVE_OMITTED
                self.to_do -= 1


@lru_cache(maxsize=4096)
def _enough(code: Code, answered: frozenset[int]) -> bool:
    return code.decode(answered) is not None

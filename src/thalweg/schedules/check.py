"""The check: a schedule is executed on names instead of numbers before any byte moves.

Every rank's chunk is represented by what it is the sum of. Sends and receives are matched as the
transports match them (sender, receiver, span, in order); a receive that nothing answers, a message
that nobody takes, a contribution counted twice or lost, or a wait in a circle is refused with the
rank, the move and the reason. A schedule with quorums is checked once for every promised set of
stragglers, whose answers never come; where there are more such sets than `PATTERNS`, for that many
drawn from a fixed seed.

A rank is asked for its next move only when nobody can go on with the moves already known, so a
program that is made lazily is never held in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import combinations
from math import comb
from random import Random

import numpy as np

from thalweg.errors import ScheduleError
from thalweg.schedules.moves import Kind, Move, Quorum
from thalweg.schedules.schedule import Content, Schedule

PATTERNS = 500
REMEDY = "the topology's program is wrong: look at the moves of that rank"
_Key = tuple[int, int, int, int]  # source, target, start, stop


def check(schedule: Schedule) -> None:
    """Raise ScheduleError unless the schedule keeps its promise."""
    for silent in straggler_sets(schedule):
        _Execution(schedule, silent).run()


def straggler_sets(schedule: Schedule) -> Iterator[frozenset[int]]:
    """Who may be late at once: nobody, or up to s answers of every quorum."""
    if not schedule.quorums:
        yield frozenset()
        return
    quorums = [
        (rank, move.quorum)
        for rank in schedule.ranks
        for move in schedule.moves(rank)
        if move.quorum is not None
    ]
    distinct = list(dict.fromkeys((rank, q.peers, q.code.stragglers) for rank, q in quorums))
    choices = [
        ([peer for peer in peers if peer != rank], stragglers)
        for rank, peers, stragglers in distinct
    ]
    if len(choices) == 1 and comb(len(choices[0][0]), choices[0][1]) <= PATTERNS:
        peers, stragglers = choices[0]
        yield from map(frozenset, combinations(peers, stragglers))
        return
    draw = Random(0)
    for _ in range(PATTERNS):
        yield frozenset(
            late for peers, most in choices for late in draw.sample(peers, min(most, len(peers)))
        )


class _Waiting:
    """A move that can't be done yet: it waits for earlier moves of its chunks, or for a message."""

    __slots__ = ("after", "frees", "move")

    def __init__(self, move: Move) -> None:
        self.move = move
        self.after = 0  # how many earlier moves it waits for
        self.frees: list[_Waiting] = []  # later moves that wait for it


class _Execution:
    """One symbolic run; `silent` ranks answer no quorum."""

    def __init__(self, schedule: Schedule, silent: frozenset[int]) -> None:
        self.schedule = schedule
        self.silent = silent
        self.chunks = range(len(schedule.sizes))
        holds = schedule.before.holds
        self.held: dict[int, list[Content | None]] = {
            rank: [holds(rank, chunk) for chunk in self.chunks] for rank in schedule.ranks
        }
        self.to_come = {rank: schedule.moves(rank) for rank in schedule.ranks}
        self.messages: dict[_Key, list[list[Content | None]]] = {}
        self.awaited: dict[_Key, list[_Waiting]] = {}
        self.waiting: dict[int, dict[_Waiting, None]] = {rank: {} for rank in schedule.ranks}
        self.blocked: dict[int, dict[int, _Waiting]] = {rank: {} for rank in schedule.ranks}
        self.answered: deque[tuple[int, _Waiting]] = deque()
        self.free = deque(schedule.ranks)  # ranks that wait for nothing

    def run(self) -> None:
        while True:
            while self.answered or self.free:
                while self.answered:
                    self._retry(*self.answered.popleft())
                if self.free:
                    self._go_on(self.free.popleft())
            ahead = [self._look_ahead(rank) for rank in self.schedule.ranks]
            if True not in ahead:
                break
        self._nobody_waits()
        self._nothing_is_left_over()
        self._promise_is_kept()

    def _go_on(self, rank: int) -> None:
        """Do moves until one has to wait."""
        if not self.waiting[rank]:
            for move in self.to_come[rank]:
                if not self._do(rank, move):
                    self._park(rank, move)
                    break

    def _look_ahead(self, rank: int) -> bool:
        """Take one more move of a rank that waits: another chunk may be able to go on."""
        for move in self.to_come[rank]:
            blocked = self.blocked[rank]
            free = not any(chunk in blocked for chunk in range(move.start, move.stop))
            if not (free and self._do(rank, move)):
                self._park(rank, move)
            return True
        return False

    def _park(self, rank: int, move: Move) -> None:
        parked, blocked = _Waiting(move), self.blocked[rank]
        span = range(move.start, move.stop)
        before = list({id(blocked[c]): blocked[c] for c in span if c in blocked}.values())
        parked.after = len(before)
        for earlier in before:
            earlier.frees.append(parked)
        blocked.update(dict.fromkeys(span, parked))
        self.waiting[rank][parked] = None
        if not before:
            self._await(rank, parked)

    def _await(self, rank: int, parked: _Waiting) -> None:
        for key in _keys(rank, parked.move):
            self.awaited.setdefault(key, []).append(parked)

    def _retry(self, rank: int, parked: _Waiting) -> None:
        """A message has come for this move. Once it is done, so may be those that wait for it."""
        if parked not in self.waiting[rank] or not self._do(rank, parked.move):
            return
        for key in _keys(rank, parked.move):
            self.awaited[key].remove(parked)
            if not self.awaited[key]:
                del self.awaited[key]
        self._done(rank, parked)

    def _done(self, rank: int, parked: _Waiting) -> None:
        done = [parked]
        while done:
            finished = done.pop()
            del self.waiting[rank][finished]
            blocked = self.blocked[rank]
            for chunk in range(finished.move.start, finished.move.stop):
                if blocked.get(chunk) is finished:
                    del blocked[chunk]
            for later in finished.frees:
                later.after -= 1
                if not later.after:
                    if self._do(rank, later.move):
                        done.append(later)
                    else:
                        self._await(rank, later)
        if not self.waiting[rank]:
            self.free.append(rank)

    def _do(self, rank: int, move: Move) -> bool:
        """Whether the move could be done."""
        kind, peer, start, stop, quorum = move
        held = self.held[rank]
        if not 0 <= start < stop <= len(held):
            raise self._wrong(rank, move, "names chunks that aren't there")
        if quorum is not None:
            return self._decode(rank, move, quorum)
        if peer == rank or peer not in self.held:
            raise self._wrong(rank, move, "names a peer outside the group")
        if kind is Kind.SEND:
            contents = held[start:stop]
            if contents[0] is None or (stop - start > 1 and _lacks(contents)):
                raise self._wrong(rank, move, "sends what it doesn't hold")
            key = (rank, peer, start, stop)
            self.messages.setdefault(key, []).append(contents)
            if key in self.awaited:
                self.answered.append((peer, self.awaited[key][0]))
            return True
        key = (peer, rank, start, stop)
        queue = self.messages.get(key)
        if queue is None:
            return False
        arrived = queue.pop(0)
        if not queue:
            del self.messages[key]
        if kind is Kind.COPY:
            held[start:stop] = arrived
        else:
            for chunk, content in enumerate(arrived, start):
                held[chunk] = self._sum(rank, move, held[chunk], content)
        return True

    def _sum(self, rank: int, move: Move, left: Content | None, right: Content | None) -> Content:
        if type(left) is int and type(right) is int:
            if left & right:
                twice = (left & right).bit_length() - 1
                raise self._wrong(rank, move, f"counts the contribution of rank {twice} twice")
            return left | right
        if left is None or right is None:
            raise self._wrong(rank, move, "adds to what it doesn't hold")
        return left + right

    def _decode(self, rank: int, move: Move, quorum: Quorum) -> bool:
        key = rank, move.start, move.stop
        answers = {
            member: self.messages[peer, *key][0]
            for member, peer in enumerate(quorum.peers)
            if (peer, *key) in self.messages and peer not in self.silent
        }
        held = self.held[rank][move.start : move.stop]
        if _lacks(held):
            raise self._wrong(rank, move, "decodes into what it doesn't hold")
        member_itself = rank in quorum.peers
        if member_itself:
            answers[quorum.peers.index(rank)] = held
        weights = quorum.code.decode(frozenset(answers))
        if weights is None:
            return False
        for offset, mine in enumerate(held):
            total = np.zeros_like(mine) if member_itself else np.array(mine)
            for member, weight in weights.items():
                total = total + weight * np.asarray(answers[member][offset])
            self.held[rank][move.start + offset] = total
        return True

    def _nobody_waits(self) -> None:
        waiting = [(rank, parked.move) for rank, moves in self.waiting.items() for parked in moves]
        stuck = [
            (rank, move)
            for rank, move in waiting
            if move.kind is not Kind.SEND and not (move.quorum and rank in self.silent)
        ]
        to_be_sent = {
            (rank, move.peer, move.start, move.stop)
            for rank, move in waiting
            if move.kind is Kind.SEND
        }
        for rank, move in stuck:
            if (move.peer, rank, move.start, move.stop) not in to_be_sent:
                raise self._wrong(rank, move, "waits for what never comes")
        for rank, move in stuck:
            raise self._wrong(rank, move, "waits in a circle")

    def _nothing_is_left_over(self) -> None:
        optional = {
            (peer, rank)
            for rank in (self.schedule.ranks if self.schedule.quorums else ())
            for move in self.schedule.moves(rank)
            if move.quorum is not None
            for peer in move.quorum.peers
        }
        for source, target, start, stop in self.messages:
            if (source, target) not in optional:
                move = Move(Kind.SEND, target, start, stop)
                raise self._wrong(source, move, "sends what nobody takes")

    def _promise_is_kept(self) -> None:
        promised = self.schedule.after.holds
        sizes = self.schedule.sizes
        for rank, held in self.held.items():
            for chunk in self.chunks:
                wanted = promised(rank, chunk)
                if wanted is None or not sizes[chunk]:
                    continue
                if not _same(held[chunk], wanted):
                    raise ScheduleError(
                        f"{self.schedule.name}: {self.schedule.after.text}, but chunk {chunk} on "
                        f"rank {rank} ends as {_described(held[chunk])} instead of "
                        f"{_described(wanted)}" + self._with_silent(),
                        REMEDY,
                    )

    def _wrong(self, rank: int, move: Move, why: str) -> ScheduleError:
        return ScheduleError(
            f"{self.schedule.name}: rank {rank} {why} ({move})" + self._with_silent(),
            REMEDY,
        )

    def _with_silent(self) -> str:
        return f", with {sorted(self.silent)} late" if self.silent else ""


def _keys(rank: int, move: Move) -> list[_Key]:
    """The messages that this rank's move takes."""
    peers = (move.peer,) if move.quorum is None else move.quorum.peers
    return [(peer, rank, move.start, move.stop) for peer in peers if peer != rank]


def _lacks(contents: list[Content | None]) -> bool:
    return any(content is None for content in contents)


def _same(held: Content | None, wanted: Content) -> bool:
    if isinstance(wanted, int):
        return isinstance(held, int) and held == wanted
    return held is not None and not isinstance(held, int) and np.allclose(held, wanted, atol=1e-9)


def _described(content: Content | None) -> str:
    if content is None:
        return "nothing"
    if isinstance(content, int):
        members = [rank for rank in range(content.bit_length()) if content >> rank & 1]
        return f"the sum of ranks {members}"
    return f"data blocks weighted {np.round(content, 6).tolist()}"

"""One execution of a schedule: each rank starts when it likes, and its moves follow as they can.

A rank's part is over when all its moves are done, and the last byte that it sends has left: others
may still wait for that, but what it was made of is free to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from thalweg.declarations import Code
from thalweg.errors import ScheduleError
from thalweg.predict.compiled_schedule import NO_RECEIVER, NO_SEND_TARGET, CompiledRank
from thalweg.schedules import Schedule

SimulatedSend = Callable[[int, int, int, Callable[[int], None], int, Callable[[], None]], None]
"""Source, target, bytes; what is called with which number once the target has the message, and what
is called once its last byte has left."""
MOVE_OMITTED = -1  # instead of what a move waits for: it won't be done


class ScheduleRun:
    def __init__(
        self,
        schedule: Schedule,
        parts: Mapping[int, CompiledRank],
        post: SimulatedSend,
        ended: Callable[[int], None],
        over: Callable[[ScheduleRun], object],
        drag: float = 1.0,
    ) -> None:
        """`ended` is told each rank that has done its part, and `over` when all have. Bytes count
        `drag` times."""
        self.schedule = schedule
        self.send = post
        self._ended = ended
        self._over = over
        self.slowdown = drag
        self._unended = len(schedule.ranks)
        self._not_started = set(schedule.ranks)
        self.roles: dict[int, _RankRun] = {
            rank: _RankRun(self, rank, part) for rank, part in parts.items()
        }

    def start(self, rank: int) -> None:
        """This rank begins its moves now."""
        self._not_started.remove(rank)
        role = self.roles[rank]
        if role.to_do:
            role.free(role.part.first)
        elif not role.leaving:
            self.end(rank)

    def end(self, rank: int) -> None:
        """It has nothing left to do; that counts once it has started, too."""
        if rank in self._not_started:
            return
        self._unended -= 1
        if not self._unended:
            self._over(self)
        self._ended(rank)

    def refuse_to_hang(self) -> None:
        if self._not_started:
            return
        rank, role = next((rank, role) for rank, role in self.roles.items() if role.to_do)
        stuck = next(index for index, waits in enumerate(role.waits) if waits > 0)
        move = list(self.schedule.moves(rank))[stuck]
        raise ScheduleError(
            f"{self.schedule.name}: rank {rank} waits for what never comes ({move})",
            "check the schedule: the topology's program is wrong",
        )


class _RankRun:
    """One rank in an exchange."""

    __slots__ = ("_answered", "exchange", "leaving", "part", "rank", "to_do", "waits")

    def __init__(self, exchange: ScheduleRun, rank: int, part: CompiledRank) -> None:
        self.exchange = exchange
        self.rank = rank
        self.part = part
        self.waits = part.waits[:]
        self.to_do = len(part.waits)
        self.leaving = 0  # messages that have bytes left to send
        self._answered: dict[int, frozenset[int]] | None = None  # members by the quorum's move

    def arrived(self, number: int) -> None:
        """A message is there, and has been handled."""
        if number < 0:
            self._answer(~number)
        elif number != NO_RECEIVER:
            self.free((number,))

    def free(self, moves: Sequence[int]) -> None:
        """One thing less to wait for: do what is ready, in the order of the list."""
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
                self._leave_out(part.overtakes.get(move, ()))
            moves = part.frees[move]
            self.to_do -= 1
            if not self.to_do and not self.leaving:
                self.exchange.end(self.rank)

    def _left(self) -> None:
        """All bytes of a message."""
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
        """One more member of a quorum; it goes on when there are enough for the first time."""
        move, member = self.part.answers[number]
        if self._answered is None:
            self._answered = dict(self.part.counted)
        code, there = self.part.quorums[move].code, self._answered[move]
        self._answered[move] = there | {member}
        if not _enough(code, there) and _enough(code, self._answered[move]):
            self.free((move,))

    def _leave_out(self, moves: Sequence[int]) -> None:
        for move in moves:
            if self.waits[move] > 0:
                self.waits[move] = MOVE_OMITTED
                self.to_do -= 1


@lru_cache(maxsize=4096)
def _enough(code: Code, answered: frozenset[int]) -> bool:
    return code.decode(answered) is not None

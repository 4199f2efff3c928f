"""One execution of a schedule: each rank starts at its own time, and moves when it can.

A rank ends when all its moves are done and its last byte has left: others may still wait for that
byte, but the rank's buffer may change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from thalweg.declarations import Code
from thalweg.errors import ScheduleError
from thalweg.predict.compiled_schedule import NO_RECEIVER, NO_SEND_TARGET, CompiledRank
from thalweg.schedules import Schedule

SimulatedSend = Callable[[int, int, int, Callable[[int], None], int, Callable[[], None]], None]
"""Source, target, bytes; the function to call when the target has received the message, and its
argument; the function to call when the last byte has left."""
MOVE_OMITTED = -1  # in place of a move's number of prerequisites


class ScheduleRun:
    def __init__(
        self,
        schedule: Schedule,
        parts: Mapping[int, CompiledRank],
        send: SimulatedSend,
        ended: Callable[[int], None],
        over: Callable[[ScheduleRun], object],
        slowdown: float = 1.0,
    ) -> None:
        """`ended` is called with each rank that has ended, and `over` when all have. Bytes count
        `slowdown` times."""
        self.schedule = schedule
        self.send = send
        self._ended = ended
        self._over = over
        self.slowdown = slowdown
        self._unended = len(schedule.ranks)
        self._not_started = set(schedule.ranks)
        self.roles: dict[int, _RankRun] = {
            rank: _RankRun(self, rank, part) for rank, part in parts.items()
        }

    def start(self, rank: int) -> None:
        """Begin the moves of a rank now."""
        self._not_started.remove(rank)
        role = self.roles[rank]
        if role.to_do:
            role.free(role.part.first)
        elif not role.leaving:
            self.end(rank)

    def end(self, rank: int) -> None:
        """Report the end of a rank, unless it hasn't started."""
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
        self._answered: dict[int, frozenset[int]] | None = None  # members, by the quorum's move

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
        if self._answered is None:
            self._answered = dict(self.part.counted)
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

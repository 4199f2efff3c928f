"""The check: a schedule is executed on names instead of numbers before any byte moves.

Every rank's chunk is represented by what it is the sum of. Sends and receives are matched as the
transports match them (sender, receiver, span, in order); a receive that nothing answers, a message
that nobody takes, a contribution counted twice or lost, or a wait in a circle is refused with the
rank, the move and the reason.

A quorum may go on without some of its answers, in any order of arrival. It is right for all of them
if its code is (`check_code`) and the answers of all members are what the code says: A = B X for the
rows B of the code and some X. Any weights w with w B = 1 then give w A = 1 X, whoever was late. So
the check waits for all answers, and sees to that.

A rank is asked for its next move only when nobody can go on with the moves already known, so a
program that is made lazily is never held in memory.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from itertools import chain, combinations, islice, takewhile
from random import Random

import numpy as np

from thalweg.codes.linear import straggler_sets
from thalweg.declarations import Code
from thalweg.errors import ScheduleError
from thalweg.schedules.moves import Move, MoveKind
from thalweg.schedules.schedule import Content, Schedule, same_content

WRONG_PROGRAM_REMEDY = "the topology's program is wrong: look at the moves of that rank"
_Key = tuple[int, int, int, int]  # source, target, start, stop
_SEND, _ANSWER, _COPY = MoveKind.SEND, MoveKind.ANSWER, MoveKind.COPY  # looked up often
_QUORUM = MoveKind.QUORUM
# Sets of arrivals that are tried; drawn from a fixed seed if there are more.
MAX_ARRIVAL_SETS = 5000


def check(schedule: Schedule) -> None:
    """Raise ScheduleError unless the schedule keeps its promise."""
    _SymbolicRun(schedule).run()


class _SymbolicRun:
    """A symbolic run of one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        initial, chunks = schedule.before.content, range(len(schedule.sizes))
        self.contents: dict[int, list[Content | None]] = {
            rank: [initial(rank, chunk) for chunk in chunks] for rank in schedule.ranks
        }
        self.to_come = {rank: schedule.moves(rank) for rank in schedule.ranks}
        self.messages: dict[_Key, list[list[Content | None]]] = {}  # the oldest first
        self.answers: set[_Key] = set()  # to quorums: some may come late, when nobody waits
        # The moves of each rank that wait for a message or for earlier moves, by chunk.
        self.waiting: dict[int, dict[int, list[Move]]] = {rank: {} for rank in schedule.ranks}
        self.awake = deque((rank, 0) for rank in schedule.ranks)  # ranks and chunks to go on with

    def run(self) -> None:
        looked_ahead = True
        while looked_ahead:
            while self.awake:
                self._go_on(*self.awake.popleft())
            looked_ahead = False
            for rank, moves in self.to_come.items():
                for move in islice(moves, 1):  # another chunk may be able to go on
                    looked_ahead = True
                    span = range(move.start, move.stop)
                    if not self.waiting[rank].keys().isdisjoint(span) or not self._do(rank, move):
                        self._wait(rank, move)
        self._nobody_waits()
        self._nothing_is_left_over()
        self._promise_is_kept()

    def _go_on(self, rank: int, chunk: int) -> None:
        """Do the moves of a chunk that need to wait no longer; if no move of the rank waits then,
        do more until one has to."""
        waiting = self.waiting[rank]
        for move in list(waiting.get(chunk, ())):
            if _is_first(move, waiting) and self._do(rank, move):
                for each in range(move.start, move.stop):
                    waiting[each].remove(move)
                    if not waiting[each]:
                        del waiting[each]
                    elif each != chunk:
                        self.awake.append((rank, each))
        if not waiting:
            for move in self.to_come[rank]:
                if not self._do(rank, move):
                    self._wait(rank, move)
                    break

    def _wait(self, rank: int, move: Move) -> None:
        for chunk in range(move.start, move.stop):
            self.waiting[rank].setdefault(chunk, []).append(move)

    def _do(self, rank: int, move: Move) -> bool:
        """Do a move; False if it has to wait for a message."""
        kind, peer, start, stop, quorum = move
        held = self.contents[rank]
        if not 0 <= start < stop <= len(held):
            raise self._wrong(rank, move, "names chunks that aren't there")
        if peer not in self.contents or (peer == rank and kind is not _QUORUM):
            raise self._wrong(rank, move, "names a peer outside the group")
        if kind is _SEND or kind is _ANSWER:
            contents = held[start:stop]
            if contents[0] is None or (stop - start > 1 and _lacks(contents)):
                raise self._wrong(rank, move, "sends what it doesn't hold")
            key = (rank if kind is _SEND else ~rank, peer, start, stop)
            self.messages.setdefault(key, []).append(contents)
            if start in self.waiting[peer]:
                self.awake.append((peer, start))
            return True
        if quorum is not None or kind is _QUORUM:
            return self._decode(rank, move)
        key = (peer, rank, start, stop)
        if key not in self.messages:
            return False
        arrived = self._taken(key)
        if kind is _COPY:
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

    def _taken(self, key: _Key) -> list[Content | None]:
        """The oldest message of this key, which is received."""
        messages = self.messages[key]
        if len(messages) == 1:
            del self.messages[key]
        return messages.pop(0)

    def _decode(self, rank: int, move: Move) -> bool:
        quorum, keys = move.quorum, _keys(rank, move)
        if quorum is None or move.peer != rank or len(set(quorum.peers)) != quorum.code.members:
            raise self._wrong(rank, move, "names another quorum than its code is for")
        if not self.answers.isdisjoint(keys):
            raise self._wrong(rank, move, "may be given a late answer to its earlier quorum")
        if not all(key in self.messages for key in keys):
            return False
        check_code(quorum.code)
        self.answers.update(keys)
        held = self.contents[rank][move.start : move.stop]
        if _lacks(held):
            raise self._wrong(rank, move, "decodes into what it doesn't hold")
        answers = {~key[0]: self._taken(key) for key in keys} | {rank: held}
        rows = np.array([quorum.code.row(member) for member in range(quorum.code.members)])
        for offset, mine in enumerate(held):
            contents = np.array([answers[peer][offset] for peer in quorum.peers], dtype=float)
            blocks, *_ = np.linalg.lstsq(rows, contents, rcond=None)
            if not same_content(rows @ blocks, contents):
                raise self._wrong(rank, move, "gets answers that aren't what its code says")
            total = blocks.sum(axis=0)
            self.contents[rank][move.start + offset] = (
                total if rank in quorum.peers or quorum.sent else total + np.asarray(mine)
            )
        return True

    def _nobody_waits(self) -> None:
        waiting = [
            (rank, move)
            for rank, by_chunk in self.waiting.items()
            for move in dict.fromkeys(chain.from_iterable(by_chunk.values()))
        ]
        to_be_sent = {
            (rank if move.kind is MoveKind.SEND else ~rank, move.peer, move.start, move.stop)
            for rank, move in waiting
            if move.kind.sends
        }
        for why, in_a_circle in (
            ("waits for what never comes", False),
            ("waits in a circle", True),
        ):
            for rank, move in waiting:
                missing = [key for key in _keys(rank, move) if key not in self.messages]
                if not move.kind.sends and to_be_sent.issuperset(missing) is in_a_circle:
                    raise self._wrong(rank, move, why)

    def _nothing_is_left_over(self) -> None:
        for source, target, start, stop in self.messages:
            kind = MoveKind.SEND if source >= 0 else MoveKind.ANSWER
            move = Move(kind, target, start, stop)
            raise self._wrong(max(source, ~source), move, "sends what nobody takes")

    def _promise_is_kept(self) -> None:
        promised = self.schedule.after.content
        for rank, held in self.contents.items():
            for chunk, size in enumerate(self.schedule.sizes):
                wanted = promised(rank, chunk)
                if size and wanted is not None and not same_content(held[chunk], wanted):
                    raise ScheduleError(
                        f"{self.schedule.name}: {self.schedule.after.text}, but chunk {chunk} on "
                        f"rank {rank} ends as {_described(held[chunk])} instead of "
                        f"{_described(wanted)}",
                        WRONG_PROGRAM_REMEDY,
                    )

    def _wrong(self, rank: int, move: Move, why: str) -> ScheduleError:
        return ScheduleError(
            f"{self.schedule.name}: rank {rank} {why} ({move})",
            WRONG_PROGRAM_REMEDY,
        )


def _is_first(move: Move, waiting: dict[int, list[Move]]) -> bool:
    """True if the move needn't wait for earlier ones, by the rule of `dataflow.order`, which needs
    the whole list: a send waits for changes of its chunks, the others also for sends."""
    sends = move.kind.sends
    return not any(
        not (sends and earlier.kind.sends)
        for chunk in range(move.start, move.stop)
        for earlier in takewhile(lambda earlier: earlier is not move, waiting[chunk])
    )


def _keys(rank: int, move: Move) -> list[_Key]:
    """The messages that this rank's move takes. An answer's sender is written as its complement."""
    if move.quorum is None:
        return [(move.peer, rank, move.start, move.stop)]
    return [(~peer, rank, move.start, move.stop) for peer in move.quorum.peers if peer != rank]


def _lacks(contents: list[Content | None]) -> bool:
    return any(content is None for content in contents)


def _described(content: Content | None) -> str:
    if content is None:
        return "nothing"
    if isinstance(content, int):
        members = [rank for rank in range(content.bit_length()) if content >> rank & 1]
        return f"the sum of ranks {members}"
    return f"data blocks weighted {np.round(content, 6).tolist()}"


@lru_cache(maxsize=256)
def check_code(code: Code) -> None:
    """Raise ScheduleError unless every arrival that the code decodes gives the sum of all blocks,
    and it decodes whenever no more than its stragglers are missing. A tree's parents have equal
    codes: each is looked at once."""
    members, most = range(code.members), code.stragglers
    if not 0 <= most < code.members:
        raise ScheduleError(
            f"a code for {code.members} can't do without {most}", "allow fewer stragglers"
        )
    rows = np.array([code.row(member) for member in members])
    ones = np.ones(rows.shape[1])
    for arrived in _arrivals(code):
        weights = code.decode(arrived)
        missing = sorted(set(members) - arrived)
        if weights is None:
            if len(missing) <= most:
                raise ScheduleError(
                    f"the code promises to do without {most}, and waits for {missing}",
                    "the code is wrong",
                )
            continue
        total = np.array([*weights.values()]) @ rows[[*weights]]
        if not weights.keys() <= arrived or not same_content(total, ones):
            raise ScheduleError(
                f"the code decodes a wrong sum without {missing}", "the code is wrong"
            )


def _arrivals(code: Code) -> list[frozenset[int]]:
    """All sets of members, or the largest promised ones and a sample of all, the same each time."""
    members = range(code.members)
    if 2**code.members <= MAX_ARRIVAL_SETS:
        every = chain.from_iterable(combinations(members, n) for n in range(code.members + 1))
        return [frozenset(arrived) for arrived in every]
    draw = Random(0)
    sizes = (draw.randint(0, code.members) for _ in range(MAX_ARRIVAL_SETS))
    drawn = [set(draw.sample(members, size)) for size in sizes]
    late = straggler_sets(code, MAX_ARRIVAL_SETS)
    return [frozenset(members) - absent for absent in (*late, *drawn)]

"""All moves of a schedule in one graph: which waits for which, and which message frees which.

The moves of all ranks are numbered one rank after the other. The order of a rank's own moves is
that of `dataflow.order`. A receive waits for one thing more, its message: the k-th message of a
span from one rank to another is taken by the k-th receive of that span there. Whatever has nothing
to wait for waits for its rank to start.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from thalweg.schedules import Kind, Move, Quorum, Schedule, order

RECEIVES = -1  # where a send has its target
NOBODY = 1 << 62  # takes a message that no receive is for
LARGEST_KEPT = 100_000  # ranks times chunks of a graph that is kept for the next replay


class Answer(NamedTuple):
    """One member's answer to a quorum."""

    quorum: int  # the number of its move
    member: int


@dataclass(slots=True)
class MoveGraph:
    """Lists are by the number of a move. `taken_by` is the receive that a send's message frees, or
    the complement of a number in `answers`."""

    waits: list[int] = field(default_factory=list)
    frees: list[tuple[int, ...]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes of a send
    taken_by: list[int] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    quorums: dict[int, Quorum] = field(default_factory=dict)
    first: dict[int, tuple[int, ...]] = field(default_factory=dict)  # what a rank's start frees
    to_do: dict[int, int] = field(default_factory=dict)  # moves by rank


def move_graph(schedule: Schedule) -> MoveGraph:
    if len(schedule.ranks) * len(schedule.sizes) > LARGEST_KEPT:
        return _build(schedule)
    return _kept(schedule)


_Key = tuple[int, int, int, int, bool]  # source, target, start, stop, whether it is an answer


def _build(schedule: Schedule) -> MoveGraph:
    graph = MoveGraph()
    receives: dict[_Key, deque[int]] = {}
    sends: list[tuple[_Key, int]] = []
    for rank in schedule.ranks:
        begin = len(graph.waits)
        steps = order(schedule.moves(rank))
        graph.first[rank] = tuple(begin + i for i, waits in enumerate(steps.waits) if not waits)
        graph.to_do[rank] = len(steps.moves)
        graph.frees += (tuple(begin + later for later in frees) for frees in steps.frees)
        graph.ranks += [rank] * len(steps.moves)
        for number, (move, waits) in enumerate(zip(steps.moves, steps.waits, strict=True), begin):
            sending = move.kind.sends
            graph.waits.append(max(waits, 1) + (not sending))
            graph.targets.append(move.peer if sending else RECEIVES)
            graph.sizes.append(schedule.span_bytes(move) if sending else 0)
            graph.taken_by.append(NOBODY)
            if sending:
                answer = move.kind is Kind.ANSWER
                sends.append(((rank, move.peer, move.start, move.stop, answer), number))
            elif move.quorum is not None:
                _expect_answers(graph, receives, rank, number, move, move.quorum)
            else:
                key = (move.peer, rank, move.start, move.stop, False)
                receives.setdefault(key, deque()).append(number)
    for key, number in sends:
        if receives.get(key):
            graph.taken_by[number] = receives[key].popleft()
    return graph


_kept = lru_cache(maxsize=64)(_build)


def _expect_answers(
    graph: MoveGraph,
    receives: dict[_Key, deque[int]],
    rank: int,
    number: int,
    move: Move,
    quorum: Quorum,
) -> None:
    graph.quorums[number] = quorum
    own = frozenset(member for member, peer in enumerate(quorum.peers) if peer == rank)
    if quorum.code.decode(own) is not None:
        graph.waits[number] -= 1
    for member, peer in enumerate(quorum.peers):
        if peer != rank:
            key = (peer, rank, move.start, move.stop, True)
            receives.setdefault(key, deque()).append(~len(graph.answers))
            graph.answers.append(Answer(number, member))

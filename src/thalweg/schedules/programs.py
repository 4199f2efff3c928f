"""The building blocks of topologies as programs, which make the moves of a rank.

A program names chunks and peers, not sizes; a rank that has no part in it gets no moves. Programs
run one after the other (`in_turn`) or mixed (`side_by_side`); chunks proceed independently in both,
so the phases of a composed all-reduce overlap by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest

from thalweg.schedules.moves import Move, MoveKind, Program, Span
from thalweg.schedules.trees import Tree

SpanSequence = Sequence[Span]
"""The part of one position of a ring, in the pieces in which it is sent."""
Peers = Mapping[int, tuple[int, ...]]
"""The peers of each rank that has any."""


def in_turn(*programs: Program) -> Program:
    return lambda rank: chain.from_iterable(program(rank) for program in programs)


def side_by_side(*programs: Program) -> Program:
    """Alternate the moves of programs on different chunks, none of which has priority."""

    def mixed(rank: int) -> Iterator[Move]:
        turns = zip_longest(*(program(rank) for program in programs))
        return (move for turn in turns for move in turn if move is not None)

    return mixed


def up(tree: Tree, spans: SpanSequence) -> Program:
    """Reduce to the root of a tree, span by span."""
    return _pass_on(tree.children, _above(tree), MoveKind.ADD, spans)


def down(tree: Tree, spans: SpanSequence) -> Program:
    """Broadcast from the root of a tree, span by span."""
    return _pass_on(_above(tree), tree.children, MoveKind.COPY, spans)


def _above(tree: Tree) -> dict[int, tuple[int, ...]]:
    return {rank: (parent,) for rank, parent in tree.parent.items()}


def _pass_on(sources: Peers, targets: Peers, kind: MoveKind, spans: SpanSequence) -> Program:
    """Receive each span from a rank's sources, then send it to the rank's targets."""

    def program(rank: int) -> Iterator[Move]:
        for start, stop in spans:
            for peer in sources.get(rank, ()):
                yield Move(kind, peer, start, stop)
            for peer in targets.get(rank, ()):
                yield Move(MoveKind.SEND, peer, start, stop)

    return program


def ring_reduce(order: Sequence[int], parts: Sequence[SpanSequence]) -> Program:
    """Reduce-scatter round a ring: position p ends with the sum of part p. At step t it passes
    part p-1-t on and adds its own to part p-2-t."""
    return _ring(order, parts, first=-1, kind=MoveKind.ADD)


def ring_gather(order: Sequence[int], parts: Sequence[SpanSequence]) -> Program:
    """All-gather round a ring: position p starts with part p, everybody ends with all parts."""
    return _ring(order, parts, first=0, kind=MoveKind.COPY)


def _ring(
    order: Sequence[int], parts: Sequence[SpanSequence], first: int, kind: MoveKind
) -> Program:
    size, position = len(order), {rank: p for p, rank in enumerate(order)}
    make, send = tuple.__new__, MoveKind.SEND  # twice as fast: a large ring has millions of moves

    def program(rank: int) -> Iterator[Move]:
        p = position.get(rank)
        if p is None:
            return
        following, previous = order[(p + 1) % size], order[p - 1]
        for step in range(size - 1):
            for start, stop in parts[(p + first - step) % size]:
                yield make(Move, (send, following, start, stop, None))
            for start, stop in parts[(p + first - 1 - step) % size]:
                yield make(Move, (kind, previous, start, stop, None))

    return program


def exchange(order: Sequence[int]) -> Program:
    """All-to-all: the i-th rank sends chunk i N + j to the j-th."""
    size, position = len(order), {rank: p for p, rank in enumerate(order)}

    def program(rank: int) -> Iterator[Move]:
        p = position[rank]
        for distance in range(1, size):
            ahead, behind = (p + distance) % size, (p - distance) % size
            outgoing, incoming = p * size + ahead, behind * size + p
            yield Move(MoveKind.SEND, order[ahead], outgoing, outgoing + 1)
            yield Move(MoveKind.COPY, order[behind], incoming, incoming + 1)

    return program


def direct(order: Sequence[int], parts: Sequence[SpanSequence]) -> Program:
    """Reduce-scatter and all-gather by direct messages: every rank sends each owner its part, the
    owner adds them up and sends the sum to all ranks. There may be fewer parts than ranks, so that
    the first few own everything."""
    size, position = len(order), {rank: p for p, rank in enumerate(order)}

    def program(rank: int) -> Iterator[Move]:
        p = position[rank]
        for kind in (MoveKind.ADD, MoveKind.COPY):
            for distance in range(1, size):  # shifted, so that not all send to one rank at once
                ahead, behind = (p + distance) % size, (p - distance) % size
                outgoing, incoming = (ahead, p) if kind is MoveKind.ADD else (p, behind)
                for start, stop in parts[outgoing] if outgoing < len(parts) else ():
                    yield Move(MoveKind.SEND, order[ahead], start, stop)
                for start, stop in parts[incoming] if incoming < len(parts) else ():
                    yield Move(kind, order[behind], start, stop)

    return program

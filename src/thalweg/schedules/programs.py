"""The patterns that every topology is made of, as programs: from a rank to its moves.

A program names chunks and peers, not sizes; a rank that has no part in it gets no moves. Programs
run one after the other (`in_turn`) or mixed (`side_by_side`); chunks make their own way in both,
so the phases of a composed all-reduce overlap by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest

from thalweg.schedules.moves import Move, MoveKind, Program, Span
from thalweg.schedules.trees import Tree

SpanSequence = Sequence[Span]
"""What one position of a ring owns, in the pieces in which it travels."""


def in_turn(*programs: Program) -> Program:
    return lambda rank: chain.from_iterable(program(rank) for program in programs)


def side_by_side(*programs: Program) -> Program:
    """One move of each by turns: for programs on different chunks, none of which goes first."""

    def mixed(rank: int) -> Iterator[Move]:
        turns = zip_longest(*(program(rank) for program in programs))
        return (move for turn in turns for move in turn if move is not None)

    return mixed


def up(tree: Tree, spans: SpanSequence) -> Program:
    """Sums climb to the root, span by span."""

    def program(rank: int) -> Iterator[Move]:
        children, parent = tree.children.get(rank, ()), tree.parent.get(rank)
        for start, stop in spans:
            for child in children:
                yield Move(MoveKind.ADD, child, start, stop)
            if parent is not None:
                yield Move(MoveKind.SEND, parent, start, stop)

    return program


def down(tree: Tree, spans: SpanSequence) -> Program:
    """What the root holds comes down to everybody."""

    def program(rank: int) -> Iterator[Move]:
        children, parent = tree.children.get(rank, ()), tree.parent.get(rank)
        for start, stop in spans:
            if parent is not None:
                yield Move(MoveKind.COPY, parent, start, stop)
            for child in children:
                yield Move(MoveKind.SEND, child, start, stop)

    return program


def climb(tree: Tree, blocks: Mapping[int, SpanSequence]) -> Program:
    """Everybody's own block climbs to the root unchanged; whoever is on its way keeps a copy."""

    def program(rank: int) -> Iterator[Move]:
        parent = tree.parent.get(rank)
        for child in (rank, *tree.children.get(rank, ())):
            for owner in [rank] if child == rank else tree.below(child):
                for start, stop in blocks[owner]:
                    if child != rank:
                        yield Move(MoveKind.COPY, child, start, stop)
                    if parent is not None:
                        yield Move(MoveKind.SEND, parent, start, stop)

    return program


def descend(tree: Tree, blocks: Mapping[int, SpanSequence]) -> Program:
    """The other way: each block goes from the root to the rank that it is for."""

    def program(rank: int) -> Iterator[Move]:
        parent = tree.parent.get(rank)
        for child in (*tree.children.get(rank, ()), rank):
            for owner in [rank] if child == rank else tree.below(child):
                for start, stop in blocks[owner]:
                    if parent is not None:
                        yield Move(MoveKind.COPY, parent, start, stop)
                    if child != rank:
                        yield Move(MoveKind.SEND, child, start, stop)

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
    make, send = (
        tuple.__new__,
        MoveKind.SEND,
    )  # a large ring has millions of moves; this is twice as fast

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


def direct_reduce(order: Sequence[int], parts: Sequence[SpanSequence]) -> Program:
    """Everybody sends each owner its part, and it adds them up. Parts beyond the end of `order`
    don't exist, so the first few ranks may own everything."""
    return _direct(order, parts, MoveKind.ADD)


def direct_gather(order: Sequence[int], parts: Sequence[SpanSequence]) -> Program:
    """Every owner sends its part to everybody."""
    return _direct(order, parts, MoveKind.COPY)


def exchange(order: Sequence[int]) -> Program:
    """Everybody sends everybody else the chunk that is for it: i N + j from i-th to j-th."""
    size, position = len(order), {rank: p for p, rank in enumerate(order)}

    def program(rank: int) -> Iterator[Move]:
        p = position[rank]
        for distance in range(1, size):
            ahead, behind = (p + distance) % size, (p - distance) % size
            outgoing, incoming = p * size + ahead, behind * size + p
            yield Move(MoveKind.SEND, order[ahead], outgoing, outgoing + 1)
            yield Move(MoveKind.COPY, order[behind], incoming, incoming + 1)

    return program


def _direct(order: Sequence[int], parts: Sequence[SpanSequence], kind: MoveKind) -> Program:
    size, position = len(order), {rank: p for p, rank in enumerate(order)}

    def program(rank: int) -> Iterator[Move]:
        p = position.get(rank)
        if p is None:
            return
        for distance in range(1, size):  # by turns, so that nobody is sent to by all at once
            ahead, behind = (p + distance) % size, (p - distance) % size
            outgoing, incoming = (ahead, p) if kind is MoveKind.ADD else (p, behind)
            for start, stop in parts[outgoing] if outgoing < len(parts) else ():
                yield Move(MoveKind.SEND, order[ahead], start, stop)
            for start, stop in parts[incoming] if incoming < len(parts) else ():
                yield Move(kind, order[behind], start, stop)

    return program

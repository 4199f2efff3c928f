"""A gradient code on a tree: every parent decodes without some of its children.

A *cell* is a part of the batch that one or more workers compute (`codes.allocation`). A parent
decodes its children's answers, adds the weighted sum of its own cells, and answers its own parent;
the root decodes the sum of all cells, which is broadcast down the same tree. A star is a tree of
one layer (gradient coding); CodedReduce has more.

The root is a node without data, which runs in the process of the rank `host`. If that rank is a
worker too, it also has a place of its own further down the tree.

No rank waits for stragglers: a result replaces all moves of its chunk that were still to be done on
the rank that receives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from thalweg.codes import TREE_ROOT, Allocation
from thalweg.schedules.chunks import in_pieces, pieces
from thalweg.schedules.group import Group
from thalweg.schedules.moves import Move, MoveKind, Program, Quorum
from thalweg.schedules.programs import SpanSequence, down, in_turn
from thalweg.schedules.schedule import Condition, Schedule
from thalweg.schedules.trees import Tree


def coded_tree(group: Group, elements: int, itemsize: int, allocation: Allocation) -> Schedule:
    hops = 2 * allocation.tree.depth
    sizes, [spans] = in_pieces([elements], pieces(group, elements * itemsize, hops=hops))
    everything = np.ones(allocation.cells)
    downwards = Tree(allocation.host, allocation.above, allocation.below)
    return Schedule(
        name="coded star" if allocation.tree.depth == 1 else "coded tree",
        ranks=group.ranks,
        sizes=tuple(sizes),
        itemsize=itemsize,
        program=in_turn(_answers(allocation, spans), down(downwards, spans)),
        before=Condition(
            "everybody holds the weighted sum of its cells of the data",
            lambda rank, _: allocation.cell_weights(rank),
        ),
        after=Condition("everybody holds the sum of all cells", lambda _rank, _chunk: everything),
    )


def _answers(allocation: Allocation, spans: SpanSequence) -> Program:
    """The way up: each rank decodes its children's answers, if any, and sends its own answer."""
    tree, parents = allocation.tree, allocation.tree.parents
    host = allocation.host
    quorums = {node: Quorum(tree.children[node], code) for node, code in tree.codes.items()}
    # Below another worker, the host sends it the sum of its own cells. The root's decoded sum has
    # these, and overwrites the host's chunk instead of being added to it.
    if parents.get(host, TREE_ROOT) != TREE_ROOT:
        quorums[TREE_ROOT] = replace(quorums[TREE_ROOT], sent=True)

    def program(rank: int) -> Iterator[Move]:
        above = parents.get(rank, TREE_ROOT)
        target = host if above == TREE_ROOT else above
        for start, stop in spans:
            if rank in quorums:
                yield Move(MoveKind.QUORUM, rank, start, stop, quorums[rank])
            if target != rank:
                yield Move(MoveKind.ANSWER, target, start, stop)
            if rank == host:
                yield Move(MoveKind.QUORUM, rank, start, stop, quorums[TREE_ROOT])

    return program

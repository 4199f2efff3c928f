"""The collectives as schedules: a program, what it starts from, and what it promises.

`elements` is the length of the whole vector. Where each rank has a block of it, the blocks are
near-equal and lie in the group's order (`Group.order`); in `all_to_all` everybody starts with a
whole vector, block j of which is for the j-th rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from thalweg.errors import LayoutError
from thalweg.schedules.chunks import in_pieces, pieces, split
from thalweg.schedules.closed_form import ClosedForm, Cost, Phase, Symbols, cost
from thalweg.schedules.group import Group
from thalweg.schedules.moves import Program, Span
from thalweg.schedules.programs import down, exchange, ring_gather, up
from thalweg.schedules.schedule import Condition, Schedule
from thalweg.schedules.trees import Tree, heap, over_racks

OWN_EVERYWHERE = Condition("everybody holds its own contribution", lambda rank, _: 1 << rank)


def reduce(group: Group, elements: int, itemsize: int, root: int, fanout: int = 2) -> Schedule:
    """A reduction in a tree; a fanout of 1 makes a chain, in which every rank sends the data
    once."""
    tree, sizes, spans = rack_tree(group, elements, itemsize, root, fanout)
    everyone = everybody(group)
    return Schedule(
        name="reduce",
        ranks=group.ranks,
        sizes=tuple(sizes),
        itemsize=itemsize,
        program=up(tree, spans),
        before=OWN_EVERYWHERE,
        after=Condition(
            f"rank {root} holds the sum of all",
            lambda rank, _: everyone if rank == root else None,
        ),
    )


def broadcast(group: Group, elements: int, itemsize: int, root: int, fanout: int = 2) -> Schedule:
    tree, sizes, spans = rack_tree(group, elements, itemsize, root, fanout)
    return Schedule(
        name="broadcast",
        ranks=group.ranks,
        sizes=tuple(sizes),
        itemsize=itemsize,
        program=down(tree, spans),
        before=Condition(
            f"rank {root} holds the data", lambda rank, _: 1 << root if rank == root else None
        ),
        after=Condition(f"everybody holds what rank {root} held", lambda _rank, _chunk: 1 << root),
    )


def all_gather(group: Group, elements: int, itemsize: int) -> Schedule:
    blocks = split(elements, group.size)
    count = pieces(group, blocks[0] * itemsize, hops=2)
    sizes, parts = in_pieces(blocks, count)
    owner = [rank for rank in group.order for _ in range(count)]
    return Schedule(
        name="all_gather",
        ranks=group.ranks,
        sizes=tuple(sizes),
        itemsize=itemsize,
        program=ring_gather(group.order, parts),
        before=Condition(
            "everybody holds its own block",
            lambda rank, chunk: 1 << rank if owner[chunk] == rank else None,
        ),
        after=Condition("everybody holds all blocks", lambda _, chunk: 1 << owner[chunk]),
    )


def all_to_all(group: Group, elements: int, itemsize: int) -> Schedule:
    """Chunk i N + j is for the j-th rank from the i-th; a rank stores those from and for it."""
    order, size = group.order, group.size
    position = {rank: p for p, rank in enumerate(order)}
    return Schedule(
        name="all_to_all",
        ranks=group.ranks,
        sizes=tuple(split(elements, size)) * size,
        itemsize=itemsize,
        program=exchange(order),
        before=Condition(
            "everybody holds a block for everybody",
            lambda rank, chunk: 1 << rank if chunk // size == position[rank] else None,
        ),
        after=Condition(
            "everybody holds everybody's block for it",
            lambda rank, chunk: (
                1 << order[chunk // size] if chunk % size == position[rank] else None
            ),
        ),
    )


def all_reduce(
    name: str, group: Group, sizes: Sequence[int], itemsize: int, program: Program
) -> Schedule:
    """The schedule of an exact topology: any program, with the postcondition of an all-reduce."""
    everyone = everybody(group)
    return Schedule(
        name=name,
        ranks=group.ranks,
        sizes=tuple(sizes),
        itemsize=itemsize,
        program=program,
        before=OWN_EVERYWHERE,
        after=Condition("everybody holds the sum of all", lambda _rank, _chunk: everyone),
    )


def everybody(group: Group) -> int:
    return sum(1 << rank for rank in group.ranks)


def rack_tree(
    group: Group, elements: int, itemsize: int, root: int, fanout: int
) -> tuple[Tree, list[int], list[Span]]:
    """A tree that enters each rack once, and the sizes and spans of the pieces that follow one
    another."""
    if root not in group.ranks:
        raise LayoutError(f"root {root} is not in the group", f"choose one of {group.ranks}")
    tree = over_racks(group.racks_from(root), heap(fanout))
    sizes, [spans] = in_pieces([elements], pieces(group, elements * itemsize, 2 * tree.depth))
    return tree, sizes, spans


def all_gather_cost(x: Symbols) -> Cost:
    """A ring in the order of the racks, S being the bytes that every member has in the end:

        (N-1) alpha;   (N-1)/N S max{beta1, beta2}

    Payloads that can't be summed are gathered by it: N of them, S = N times one."""
    moves, share = x.N - 1, (x.N - 1) / x.N * x.S
    crossings, uplink = (min(moves, x.C), share) if x.C > 1 else (0, 0.0)
    return cost(replace(x, k=1), Phase(moves=moves, crossings=crossings, nic=share, uplink=uplink))


def all_to_all_cost(x: Symbols) -> Cost:
    """Every member sends an N-th of its S to each of the others. No rack reduces before it sends,
    so all messages of a rack's G members to the N-G others go through its uplink:

        (N-1) alpha;   S max{ (N-1)/N beta1, G (N-G)/N beta2 }

    A two-shot exchange of compressed payloads is this and an all-gather of as many bytes."""
    outside = x.G * (x.N - x.G) / x.N * x.S if x.C > 1 else 0.0
    there = Phase(moves=x.N - 1, crossings=int(x.C > 1), nic=(x.N - 1) / x.N * x.S, uplink=outside)
    return cost(replace(x, k=1), there)


def chain_cost(x: Symbols) -> Cost:
    """A chain of N members in a rack that broadcasts S, or reduces to one end: N-1 hops, each over
    links of its own.

        (N+k-2) (alpha + S beta1/k)"""
    hop = Phase(moves=1, nic=x.S)
    return cost(x, *[hop] * (x.N - 1), busiest=hop if x.N > 1 else Phase())


COLLECTIVE_FORMS: Mapping[str, ClosedForm] = {
    "all_gather": all_gather_cost,
    "all_to_all": all_to_all_cost,
    "reduce": chain_cost,
    "broadcast": chain_cost,
}

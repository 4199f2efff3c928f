"""The collectives as schedules: a program, what it starts from, and what it promises.

`elements` is the length of the whole vector. Where each rank has a block of it, the blocks are
near-equal and lie in the group's order (`Group.order`); in `all_to_all` everybody starts with a
whole vector, block j of which is for the j-th rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.errors import LayoutError
from thalweg.schedules import programs
from thalweg.schedules.chunks import in_pieces, pieces, singles, split
from thalweg.schedules.group import Group
from thalweg.schedules.moves import Program, Span
from thalweg.schedules.programs import SpanSequence
from thalweg.schedules.schedule import Condition, Schedule
from thalweg.schedules.trees import heap, over_racks


def reduce(group: Group, elements: int, itemsize: int, root: int, fanout: int = 2) -> Schedule:
    """A reduction in a tree; a fanout of 1 makes a chain, in which every rank sends the data
    once."""
    tree = over_racks(group.racks_from(_member(group, root)), heap(fanout))
    sizes = split(elements, pieces(group, elements * itemsize, 2 * tree.depth))
    return Schedule(
        name="reduce",
        ranks=group.ranks,
        sizes=tuple(sizes),
        itemsize=itemsize,
        program=programs.up(tree, singles(0, len(sizes))),
        before=own_everywhere(),
        after=_at(f"rank {root} holds the sum of all", group, everybody(group), {root}),
    )


def broadcast(group: Group, elements: int, itemsize: int, root: int, fanout: int = 2) -> Schedule:
    tree = over_racks(group.racks_from(_member(group, root)), heap(fanout))
    sizes = split(elements, pieces(group, elements * itemsize, 2 * tree.depth))
    return Schedule(
        name="broadcast",
        ranks=group.ranks,
        sizes=tuple(sizes),
        itemsize=itemsize,
        program=programs.down(tree, singles(0, len(sizes))),
        before=_at(f"rank {root} holds the data", group, 1 << root, {root}),
        after=_at(f"everybody holds what rank {root} held", group, 1 << root, set(group.ranks)),
    )


def gather(group: Group, elements: int, itemsize: int, root: int) -> Schedule:
    tree = over_racks(group.racks_from(_member(group, root)), heap(2))
    sizes, parts = blocks(group, elements, itemsize, hops=tree.depth)
    owner = owners(group, parts)
    return Schedule(
        name="gather",
        ranks=group.ranks,
        sizes=sizes,
        itemsize=itemsize,
        program=programs.climb(tree, dict(zip(group.order, parts, strict=True))),
        before=own_block(owner),
        after=Condition(
            f"rank {root} holds everybody's block",
            lambda rank, chunk: 1 << owner[chunk] if rank == root else None,
        ),
    )


def scatter(group: Group, elements: int, itemsize: int, root: int) -> Schedule:
    tree = over_racks(group.racks_from(_member(group, root)), heap(2))
    sizes, parts = blocks(group, elements, itemsize, hops=tree.depth)
    owner = owners(group, parts)
    return Schedule(
        name="scatter",
        ranks=group.ranks,
        sizes=sizes,
        itemsize=itemsize,
        program=programs.descend(tree, dict(zip(group.order, parts, strict=True))),
        before=_at(f"rank {root} holds the data", group, 1 << root, {root}),
        after=Condition(
            f"everybody holds its block of what rank {root} held",
            lambda rank, chunk: 1 << root if owner[chunk] == rank else None,
        ),
    )


def reduce_scatter(group: Group, elements: int, itemsize: int) -> Schedule:
    sizes, parts = blocks(group, elements, itemsize, hops=2)
    owner, everyone = owners(group, parts), everybody(group)
    return Schedule(
        name="reduce_scatter",
        ranks=group.ranks,
        sizes=sizes,
        itemsize=itemsize,
        program=programs.ring_reduce(group.order, parts),
        before=own_everywhere(),
        after=Condition(
            "everybody holds the sum of its block",
            lambda rank, chunk: everyone if owner[chunk] == rank else None,
        ),
    )


def all_gather(group: Group, elements: int, itemsize: int) -> Schedule:
    sizes, parts = blocks(group, elements, itemsize, hops=2)
    owner = owners(group, parts)
    return Schedule(
        name="all_gather",
        ranks=group.ranks,
        sizes=sizes,
        itemsize=itemsize,
        program=programs.ring_gather(group.order, parts),
        before=own_block(owner),
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
        program=programs.exchange(order),
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
    return Schedule(
        name=name,
        ranks=group.ranks,
        sizes=tuple(sizes),
        itemsize=itemsize,
        program=program,
        before=own_everywhere(),
        after=_at("everybody holds the sum of all", group, everybody(group), set(group.ranks)),
    )


def blocks(
    group: Group, elements: int, itemsize: int, hops: int
) -> tuple[tuple[int, ...], list[list[Span]]]:
    """One part of the vector for each member, cut into pieces: all sizes, and the spans of each."""
    per_member = split(elements, group.size)
    sizes, spans = in_pieces(per_member, pieces(group, per_member[0] * itemsize, hops))
    return tuple(sizes), spans


def owners(group: Group, parts: Sequence[SpanSequence]) -> dict[int, int]:
    """The owner of each chunk: the rank whose part it is in."""
    return {
        chunk: rank
        for rank, part in zip(group.order, parts, strict=True)
        for start, stop in part
        for chunk in range(start, stop)
    }


def everybody(group: Group) -> int:
    return sum(1 << rank for rank in group.ranks)


def own_everywhere() -> Condition:
    return Condition("everybody holds its own contribution", lambda rank, _: 1 << rank)


def own_block(owner: dict[int, int]) -> Condition:
    return Condition(
        "everybody holds its own block",
        lambda rank, chunk: 1 << rank if owner[chunk] == rank else None,
    )


def _at(text: str, group: Group, content: int, where: set[int]) -> Condition:
    if where == set(group.ranks):
        return Condition(text, lambda _rank, _chunk: content)
    return Condition(text, lambda rank, _: content if rank in where else None)


def _member(group: Group, root: int) -> int:
    if root not in group.ranks:
        raise LayoutError(f"root {root} is not in the group", f"choose one of {group.ranks}")
    return root

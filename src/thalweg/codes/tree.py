"""Who answers whom in a coded tree, and with which code.

The root is not a worker: it decodes, and computes nothing. It lives in a worker's process or in one
of its own, and is called ROOT here. Every other node is a worker, known by its rank.

A family of codes is declared by a file in this folder that holds a `CODE`; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from thalweg.declarations import Code
from thalweg.errors import LayoutError
from thalweg.facts import counted

TREE_ROOT = -1


@dataclass(frozen=True, slots=True)
class CodedTree:
    """`children` of the root and of every worker, in the order of their parent's code."""

    children: Mapping[int, tuple[int, ...]]
    codes: Mapping[int, Code]  # of every parent

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(node for node in self.top_down() if node != TREE_ROOT)

    @property
    def parents(self) -> dict[int, int]:
        return {child: node for node, below in self.children.items() for child in below}

    @property
    def depth(self) -> int:
        """Layers of workers."""
        return sum(1 for _ in self.layers()) - 1

    def layers(self) -> Iterator[tuple[int, ...]]:
        layer: tuple[int, ...] = (TREE_ROOT,)
        while layer:
            yield layer
            layer = tuple(child for node in layer for child in self.children[node])

    def top_down(self) -> Iterator[int]:
        for layer in self.layers():
            yield from layer


def even_children(
    workers: Sequence[int], fanout: int, stragglers: int
) -> dict[int, tuple[int, ...]]:
    """Siblings' subtrees of near-equal sizes; every parent has more children than may be late, and
    at most `fanout` unless so few are left that they can't form two layers."""
    refuse_what_does_not_fit(len(workers), fanout, stragglers)
    children: dict[int, tuple[int, ...]] = {}
    layer = [(TREE_ROOT, len(workers))]  # nodes, and how many are below each
    seats = iter(workers)
    while layer:
        following: list[tuple[int, int]] = []
        for node, below in layer:
            direct = _direct(below, fanout, stragglers)
            children[node] = tuple(next(seats) for _ in range(direct))
            rest = below - direct
            sizes = [rest // direct + (i < rest % direct) for i in range(direct)] if direct else []
            following += zip(children[node], sizes, strict=True)
        layer = following
    return children


def _direct(below: int, fanout: int, stragglers: int) -> int:
    """How many of those below a node are its children: as many as leave each of them enough."""
    if below <= fanout:
        return below
    with_enough = min(fanout, below // (stragglers + 2))
    return with_enough if with_enough > stragglers else below


def refuse_what_does_not_fit(workers: int, fanout: int, stragglers: int) -> None:
    if stragglers >= workers:
        who = counted(workers, "worker")
        raise LayoutError(
            f"{who} can't do without {stragglers}",
            f"use stragglers={workers - 1} or less, or {stragglers + 1} workers or more"
            if workers > 1
            else "use more workers",
        )
    if stragglers >= fanout:
        raise LayoutError(
            f"a parent of {fanout} can't do without {stragglers} of them",
            f"use stragglers={fanout - 1} or less, or a larger fanout",
        )


BuildCodedTree = Callable[[Sequence[int], int, int], CodedTree]
"""From the workers (most reliable first), the fanout and the stragglers to who answers whom, and
the code of every parent. With as many children as workers it is a star."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFamily:
    name: str
    summary: str
    make: Callable[[int, int], Code]  # (members, stragglers)
    build_tree: BuildCodedTree
    partial: bool = False  # whether what some have sent is part of the sum

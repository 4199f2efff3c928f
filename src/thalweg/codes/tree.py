"""The parents and children of a coded tree, and the code at every parent.

The root is not a worker: it decodes, and computes nothing. It runs in a worker's process or in one
of its own, and is called TREE_ROOT here. Every other node is a worker, identified by its rank.

A family of codes is declared by a file in this folder, or an installed package's entry point, that
holds a `CODE`; nothing else changes. Advice tries its `variants`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from thalweg.declarations import Code, Variant
from thalweg.errors import LayoutError
from thalweg.facts import counted

TREE_ROOT = -1


@dataclass(frozen=True, slots=True)
class CodedTree:
    """A tree with the `children` of the root and of every worker, in the order of its code."""

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
        """The number of layers of workers."""
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
    """Children such that siblings' subtrees have near-equal sizes; every parent has more children
    than stragglers, and at most `fanout` unless too few are left for two layers."""
    refuse_what_does_not_fit(len(workers), fanout, stragglers)
    children: dict[int, tuple[int, ...]] = {}
    layer = [(TREE_ROOT, len(workers))]  # nodes, and the number of workers below each
    unplaced = iter(workers)
    while layer:
        following: list[tuple[int, int]] = []
        for node, below in layer:
            direct = _direct(below, fanout, stragglers)
            children[node] = tuple(next(unplaced) for _ in range(direct))
            rest = below - direct
            sizes = [rest // direct + (i < rest % direct) for i in range(direct)] if direct else []
            following += zip(children[node], sizes, strict=True)
        layer = following
    return children


def _direct(below: int, fanout: int, stragglers: int) -> int:
    """The number of direct children of a node: the most that leave each of them enough below."""
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
"""Builds a tree from the workers (most reliable first), the fanout and the number of stragglers.
With a fanout of all workers it is a star."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFamily:
    name: str
    summary: str
    make: Callable[[int, int], Code]  # (members, stragglers)
    build_tree: BuildCodedTree
    partial: bool = False  # True if the answers of some are part of the sum
    variants: tuple[Variant, ...] = ()

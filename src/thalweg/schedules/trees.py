"""Trees over a group, shaped so that each rack is entered once.

A shape gives the parent of each of the positions 0..n-1. `over_racks` applies it twice: between the
racks, and inside each rack below the rack's own root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

TreeShape = Callable[[int], list[int | None]]
"""Maps a number of nodes to the parent of each; the root's is None."""


@dataclass(frozen=True, slots=True)
class Tree:
    root: int
    parent: dict[int, int]  # of every rank but the root
    children: dict[int, tuple[int, ...]]

    @property
    def depth(self) -> int:
        """The number of edges from the root to the farthest leaf."""
        depth, layer = 0, self.children[self.root]
        while layer:
            depth, layer = depth + 1, tuple(c for rank in layer for c in self.children[rank])
        return depth


def heap(fanout: int) -> TreeShape:
    """The complete tree in which every node has up to `fanout` children; 1 makes a chain."""
    return lambda n: [None if i == 0 else (i - 1) // fanout for i in range(n)]


def binary(n: int) -> list[int | None]:
    """In-order binary tree of Sanders, Speck and Träff (Parallel Computing 35, 2009), as NCCL
    builds it: a node's height is the lowest set bit of its number, so odd ones are leaves. The
    root, 0, has one child."""
    parents: list[int | None] = [None]
    for i in range(1, n):
        bit = i & -i
        up = (i ^ bit) | (bit << 1)
        parents.append(up if up < n else i ^ bit)
    return parents


def complement(n: int) -> list[int | None]:
    """`binary` renumbered so that its leaves are the other tree's inner nodes: mirrored for even
    n, shifted by one for odd n (then one node is inner in both)."""
    there = [(n - 1 - i) if n % 2 == 0 else (i + 1) % n for i in range(n)]
    parents: list[int | None] = [None] * n
    for i, up in enumerate(binary(n)):
        parents[there[i]] = None if up is None else there[up]
    return parents


def over(ranks: tuple[int, ...], shape: TreeShape) -> Tree:
    parents = zip(ranks, shape(len(ranks)), strict=True)
    return _tree({rank: None if up is None else ranks[up] for rank, up in parents})


def over_racks(racks: Sequence[tuple[int, ...]], shape: TreeShape) -> Tree:
    """`shape` between the racks' roots, and `shape` again inside each rack."""
    inside = [over(rack, shape) for rack in racks]
    between = over(tuple(tree.root for tree in inside), shape)
    up: dict[int, int | None] = {between.root: None, **between.parent}
    for tree in inside:
        up |= tree.parent
    return _tree(up)


def _tree(up: dict[int, int | None]) -> Tree:
    parent = {rank: above for rank, above in up.items() if above is not None}
    below: dict[int, list[int]] = {rank: [] for rank in up}
    for rank, above in parent.items():
        below[above].append(rank)
    root = next(rank for rank, above in up.items() if above is None)
    return Tree(root, parent, {rank: tuple(children) for rank, children in below.items()})

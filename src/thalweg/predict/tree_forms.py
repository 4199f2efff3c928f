"""Trees in closed form: what a node's NIC carries is its degree.

Whatever climbs comes down the same edge, so in each direction a node's NIC carries its degree times
the tree's data, and a rack's uplink the rack's degree among the racks. A chunk takes `depth` hops
up and as many down; at a hop, a parent takes its children's chunks in through one NIC. Each further
chunk costs two moves, one on the way up and one on the way down:

    2(depth + k - 1) alpha;   (1 - 1/k) degree S beta  +  2 depth children S beta / k

The table has 2(log N + k) (alpha + S beta2/k) for the double tree. With its degrees of two in full
and two children that send half of S each, this is right for one rack of an even number of members,
but for one chunk too many. Over racks the depth is that of the racks' tree and of the tree in a
rack, ceil(log2 C) + ceil(log2 G), and a rack's root has children in both, so its NIC carries up to
2.5 S. `cost.best_chunks` finds the best k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from thalweg.predict.cost import Cost, Phase, cost
from thalweg.predict.symbols import Symbols
from thalweg.schedules.trees import Shape, Tree, binary, complement, heap, over, over_racks


def tree(x: Symbols, fanout: int) -> Cost:
    """Everybody has up to `fanout` children in its rack, and the racks' roots as many racks. A
    single tree leaves one direction of the leaves' NICs idle. Not in the table."""
    return _trees(x, [heap(fanout)])


def double_tree(x: Symbols) -> Cost:
    """Half of S on each of two binary trees, in which the leaves of one are inner in the other."""
    return _trees(x, [binary, complement])


def _trees(x: Symbols, shapes: Sequence[Shape]) -> Cost:
    """S in equal parts on trees of these shapes, side by side."""
    part = x.S / len(shapes)
    racks = [tuple(range(rack * x.G, (rack + 1) * x.G)) for rack in range(x.C)]
    whole = [over_racks(racks, shape) for shape in shapes]
    between = [over(tuple(range(x.C)), shape) for shape in shapes]
    inside = [over(tuple(range(x.G)), shape) for shape in shapes]
    far = Phase(
        moves=1,
        crossings=1,
        nic=part * _most_children(between),
        uplink=part * _most_children(between),
    )
    near = Phase(moves=1, nic=part * _most_children(inside))
    load = Phase(moves=2, nic=part * _busiest_degree(whole), uplink=part * _busiest_degree(between))
    way = [far] * max(t.depth for t in between) + [near] * max(t.depth for t in inside)
    return cost(x, *way, *way, busiest=load)


def _most_children(trees: Sequence[Tree]) -> int:
    return max(len(children) for tree in trees for children in tree.children.values())


def _busiest_degree(trees: Sequence[Tree]) -> int:
    """Edges of a node in all trees together, of the node that has the most."""
    degrees: Counter[int] = Counter()
    for tree in trees:
        for child, parent in tree.parent.items():
            degrees.update((child, parent))
    return max(degrees.values(), default=0)

"""k-ary tree: sums climb, the result comes down, in pieces that follow one another.

2 log_k N hops instead of a ring's 2(N-1), for 1 + k times the data through an inner node's NIC:
for messages so small that latency counts. One tree spans the racks and one each rack, so an uplink
carries a rack's sum up once, and down once for each rack below it.

The coded form (CodedReduce) is a tree of its own, in which every parent can do without some of its
children.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from thalweg.declarations import Parameter, Variant
from thalweg.schedules import Group, Schedule, Topology, all_reduce
from thalweg.schedules.closed_form import Cost, Phase, Symbols, cost
from thalweg.schedules.collectives import rack_tree
from thalweg.schedules.programs import down, in_turn, up
from thalweg.schedules.trees import Tree, TreeShape, heap, over, over_racks


def tree(group: Group, elements: int, itemsize: int, step: int, fanout: int) -> Schedule:
    shape, sizes, spans = rack_tree(group, elements, itemsize, group.best_connected(), fanout)
    return all_reduce("tree", group, sizes, itemsize, in_turn(up(shape, spans), down(shape, spans)))


def tree_cost(x: Symbols, fanout: int | None = 2) -> Cost:
    """A tree in which each member has up to `fanout` children in its rack, and each rack's root as
    many racks. It leaves one direction of the leaves' NICs idle. Not in the table."""
    return cost_of_trees(x, [heap(2 if fanout is None else fanout)])


def cost_of_trees(x: Symbols, shapes: Sequence[TreeShape]) -> Cost:
    """The cost of S in equal parts on trees of these shapes, side by side.

    The sums go up and the results go down the same edges, so in each direction a node's NIC carries
    its degree times the tree's data, and a rack's uplink the rack's degree among the racks. A chunk
    takes `depth` hops up and as many down; at a hop, a parent receives its children's chunks
    through one NIC. Each further chunk costs two moves, one up and one down:

        2(depth + k - 1) alpha;   (1 - 1/k) degree S beta  +  2 depth children S beta / k
    """
    part = x.S / len(shapes)
    racks = [tuple(range(rack * x.G, (rack + 1) * x.G)) for rack in range(x.C)]
    whole = [over_racks(racks, shape) for shape in shapes]
    between = [over(tuple(range(x.C)), shape) for shape in shapes]
    inside = [over(tuple(range(x.G)), shape) for shape in shapes]
    received = part * _most_children(between)
    far = Phase(moves=1, crossings=1, nic=received, uplink=received)
    near = Phase(moves=1, nic=part * _most_children(inside))
    load = Phase(moves=2, nic=part * _busiest_degree(whole), uplink=part * _busiest_degree(between))
    up = [far] * max(t.depth for t in between) + [near] * max(t.depth for t in inside)
    return cost(x, *up, *up, busiest=load)


def _most_children(trees: Sequence[Tree]) -> int:
    return max(len(children) for tree in trees for children in tree.children.values())


def _busiest_degree(trees: Sequence[Tree]) -> int:
    """The largest number of edges that a node has in all trees together."""
    degrees = Counter(node for tree in trees for edge in tree.parent.items() for node in edge)
    return max(degrees.values(), default=0)


TOPOLOGY = Topology(
    name="tree",
    summary="sums climb a tree and the result comes down: few sequential moves",
    build=tree,
    form=tree_cost,
    variants=(Variant(text="tree", place=4),),
    coded_fanout=lambda workers, fanout: fanout,
    parameters={"fanout": Parameter(kind=int, default=2, least=1, help="children of a node")},
)

"""Two binary trees, each carrying half of the data, in which the leaves of one are the inner nodes
of the other (Sanders, Speck and Träff, Parallel Computing 35, 2009).

A single tree leaves half of the NICs idle: leaves only send up and receive down. With two, every
rank is inner in one and leaf in the other, sends and receives about twice the data in all, and
needs only 2 log2 N hops. For odd N one rank is inner in both. Between the racks the same two trees
are built over the racks, rooted at different members.
"""

from __future__ import annotations

from thalweg.declarations import Variant
from thalweg.schedules import Group, Schedule, Topology, all_reduce
from thalweg.schedules.chunks import in_pieces, pieces, split
from thalweg.schedules.closed_form import Cost, Symbols
from thalweg.schedules.programs import down, in_turn, side_by_side, up
from thalweg.schedules.topologies.tree import cost_of_trees
from thalweg.schedules.trees import binary, complement, over_racks


def double_tree(group: Group, elements: int, itemsize: int, step: int) -> Schedule:
    trees = [over_racks(group.racks, binary), over_racks(group.racks, complement)]
    halves = split(elements, 2)
    hops = 2 * max(tree.depth for tree in trees)
    sizes, spans = in_pieces(halves, pieces(group, halves[0] * itemsize, hops))
    program = side_by_side(
        *(
            in_turn(up(tree, half), down(tree, half))
            for tree, half in zip(trees, spans, strict=True)
        )
    )
    return all_reduce("double_tree", group, sizes, itemsize, program)


def double_tree_cost(x: Symbols) -> Cost:
    """Half of S on each of two binary trees, in which the leaves of one are inner in the other.

    The table has 2(log N + k) (alpha + S beta2/k). With its degrees of two in full and two children
    that send half of S each, this is right for one rack of an even number of members, but for one
    chunk too many. Over racks the depth is that of the racks' tree and of the tree in a rack,
    ceil(log2 C) + ceil(log2 G), and a rack's root has children in both, so its NIC carries up to
    2.5 S.
    """
    return cost_of_trees(x, [binary, complement])


TOPOLOGY = Topology(
    name="double_tree",
    summary="two complementary binary trees, half of the data each: few moves, every NIC busy",
    build=double_tree,
    form=double_tree_cost,
    lanes=lambda group: 2,
    variants=(Variant(text="double_tree", place=3),),
    is_calibrated=True,
)

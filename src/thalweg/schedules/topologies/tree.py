"""k-ary tree: sums climb, the result comes down, in pieces that follow one another.

2 log_k N hops instead of a ring's 2(N-1), for 1 + k times the data through an inner node's NIC:
for messages so small that latency counts. One tree spans the racks and one each rack, so an uplink
carries a rack's sum up once, and down once for each rack below it.

The coded form (CodedReduce) is a tree of its own, in which every parent can do without some of its
children.
"""

from __future__ import annotations

from thalweg.declarations import Parameter
from thalweg.schedules import Group, Schedule, Topology, all_reduce
from thalweg.schedules.chunks import singles
from thalweg.schedules.collectives import rack_tree
from thalweg.schedules.programs import down, in_turn, up


def tree(group: Group, elements: int, itemsize: int, step: int, fanout: int) -> Schedule:
    shape, sizes = rack_tree(group, elements, itemsize, group.best_connected(), fanout)
    spans = singles(0, len(sizes))
    return all_reduce("tree", group, sizes, itemsize, in_turn(up(shape, spans), down(shape, spans)))


TOPOLOGY = Topology(
    name="tree",
    summary="sums climb a tree and the result comes down: few sequential moves",
    build=tree,
    coded_fanout=lambda workers, fanout: fanout,
    parameters={"fanout": Parameter(kind=int, default=2, least=1, help="children of a node")},
)

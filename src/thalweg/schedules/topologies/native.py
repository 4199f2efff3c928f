"""The backend's own all-reduce, which Thalweg calls and does not schedule.

So that it can be drawn and priced like the rest, it is described as what Gloo does for large
tensors: a ring in the order of the rank numbers, whatever the racks.
"""

from __future__ import annotations

from thalweg.schedules.chunks import split
from thalweg.schedules.collectives import all_reduce
from thalweg.schedules.group import Group
from thalweg.schedules.programs import in_turn, ring_gather, ring_reduce, singles
from thalweg.schedules.schedule import Schedule
from thalweg.schedules.topology import Topology

PIECES = 2  # Gloo cuts into two chunks per rank


def native(group: Group, elements: int, itemsize: int, step: int) -> Schedule:
    order = sorted(group.ranks)
    sizes = [size for part in split(elements, group.size) for size in split(part, PIECES)]
    spans = [singles(i * PIECES, (i + 1) * PIECES) for i in range(group.size)]
    program = in_turn(ring_reduce(order, spans), ring_gather(order, spans))
    return all_reduce("native", group, sizes, itemsize, program)


TOPOLOGY = Topology(
    name="native",
    summary="torch's own all-reduce; drawn as Gloo does it, a ring in order of rank",
    build=native,
    backend=True,
)

"""Ring all-reduce (Patarasuk and Yuan, JPDC 69, 2009): reduce-scatter, then all-gather.

Every rank sends 2(N-1)/N of the data, the least there is, in 2(N-1) sequential moves. The ring
follows the racks, so it crosses each uplink once each way whatever the rank numbers are. Each part
travels in two pieces where the link is busy longer with one than its latency: while the second is
on the wire, the first is added and passed on.
"""

from __future__ import annotations

from thalweg.schedules.chunks import split
from thalweg.schedules.collectives import all_reduce
from thalweg.schedules.group import Group
from thalweg.schedules.programs import in_turn, ring_gather, ring_reduce, singles
from thalweg.schedules.schedule import Schedule
from thalweg.schedules.topology import Topology


def ring(group: Group, elements: int, itemsize: int, step: int) -> Schedule:
    parts = split(elements, group.size)
    part_seconds = parts[0] * itemsize / group.slowest_bytes_per_second()
    pieces = 2 if part_seconds > 2 * group.longest_seconds() else 1
    sizes = [size for part in parts for size in split(part, pieces)]
    spans = [singles(i * pieces, (i + 1) * pieces) for i in range(group.size)]
    program = in_turn(ring_reduce(group.order, spans), ring_gather(group.order, spans))
    return all_reduce("ring", group, sizes, itemsize, program)


TOPOLOGY = Topology(
    name="ring",
    summary="reduce-scatter and all-gather round a ring: fewest bytes, many sequential moves",
    build=ring,
)

"""Ring all-reduce (Patarasuk and Yuan, JPDC 69, 2009): reduce-scatter, then all-gather.

Every rank sends 2(N-1)/N of the data, the least there is, in 2(N-1) sequential moves. The ring
follows the racks, so it crosses each uplink once each way whatever the rank numbers are. Each part
travels in two pieces where the link is busy longer with one than its latency: while the second is
on the wire, the first is added and passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thalweg.declarations import Variant
from thalweg.schedules import Group, Schedule, Topology, all_reduce
from thalweg.schedules.chunks import in_pieces, split
from thalweg.schedules.closed_form import Cost, Phase, Symbols, cost
from thalweg.schedules.programs import in_turn, ring_gather, ring_reduce


def ring(group: Group, elements: int, itemsize: int, step: int) -> Schedule:
    pieces = pieces_of(group, elements, itemsize)
    return round_ring("ring", group, group.order, elements, itemsize, pieces)


def pieces_of(group: Group, elements: int, itemsize: int) -> int:
    """The number of pieces in which each part is sent."""
    part_bytes = split(elements, group.size)[0] * itemsize
    part_seconds = part_bytes / group.slowest_bytes_per_second()
    return 2 if part_seconds > 2 * group.longest_seconds() else 1


def round_ring(
    name: str, group: Group, order: Sequence[int], elements: int, itemsize: int, pieces: int
) -> Schedule:
    """The all-reduce round a ring in this order, with each rank's part cut into `pieces`."""
    sizes, spans = in_pieces(split(elements, group.size), pieces)
    program = in_turn(ring_reduce(order, spans), ring_gather(order, spans))
    return all_reduce(name, group, sizes, itemsize, program)


def ring_cost(x: Symbols, leaving: int = 1) -> Cost:
    """Every member sends 2(N-1) parts of S/N, and receives as many (Patarasuk and Yuan, 2009):

        2(N-1) alpha;   2(N-1)/N S max{beta1, r beta2}

    where r, `leaving`, is the number of members of a rack whose successor is in another rack. A
    ring in the order of the racks leaves each once; one that alternates between racks leaves at
    every hop, r = G. The table has r = 1, and beta2 for max{beta1, beta2}."""
    moves, share = 2 * (x.N - 1), 2 * (x.N - 1) / x.N * x.S
    crossings = min(moves, 2 * x.C * leaving) if x.C > 1 else 0
    uplink = share * leaving if x.C > 1 else 0.0
    return cost(replace(x, k=1), Phase(moves=moves, crossings=crossings, nic=share, uplink=uplink))


TOPOLOGY = Topology(
    name="ring",
    summary="reduce-scatter and all-gather round a ring: fewest bytes, many sequential moves",
    build=ring,
    form=ring_cost,
    variants=(Variant(text="ring", compressed=True, place=1),),
)

"""Recursive vector halving and distance doubling, then back (Rabenseifner; Thakur et al., 2005).

At step t a rank exchanges half of what it still cares for with the rank at distance 2^t: S/2 with
its neighbour, S/4 two further, ...; so most bytes stay near. If the number and the size of the
racks are powers of two, an uplink carries no more than in a hierarchy. 2 log2 N sequential moves,
2(N-1)/N of the data.

For N that is not a power of two, p' = 2^floor(log2 N) take part; each of the N - p' others first
gives all it has to its neighbour, and gets the result from it in the end, as in MPICH:
2 floor(log2 N) + 2 moves, and 2(p'-1)/p' + 1 times the data sent by a rank with such a neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator

from thalweg.schedules import Group, Move, MoveKind, Schedule, Topology, all_reduce
from thalweg.schedules.chunks import split
from thalweg.schedules.moves import Span


def halving_doubling(group: Group, elements: int, itemsize: int, step: int) -> Schedule:
    stages = group.size.bit_length() - 1
    whole = (0, 1 << stages)
    extra = group.size - (1 << stages)
    guests = dict(zip(group.order[0 : 2 * extra : 2], group.order[1 : 2 * extra : 2], strict=True))
    hosts = {host: guest for guest, host in guests.items()}
    core = [rank for rank in group.order if rank not in guests]

    def program(rank: int) -> Iterator[Move]:
        if rank in guests:
            yield Move(MoveKind.SEND, guests[rank], *whole)
            yield Move(MoveKind.COPY, guests[rank], *whole)
            return
        if rank in hosts:
            yield Move(MoveKind.ADD, hosts[rank], *whole)
        position = core.index(rank)
        kept: list[tuple[int, Span, Span]] = []
        span = whole
        for stage in range(stages):
            partner = core[position ^ (1 << stage)]
            start, stop = span
            middle = (start + stop) // 2
            halves = (start, middle), (middle, stop)
            mine, theirs = halves if not position >> stage & 1 else halves[::-1]
            yield Move(MoveKind.SEND, partner, *theirs)
            yield Move(MoveKind.ADD, partner, *mine)
            kept.append((partner, mine, theirs))
            span = mine
        for partner, mine, theirs in reversed(kept):
            yield Move(MoveKind.SEND, partner, *mine)
            yield Move(MoveKind.COPY, partner, *theirs)
        if rank in hosts:
            yield Move(MoveKind.SEND, hosts[rank], *whole)

    return all_reduce("halving_doubling", group, split(elements, 1 << stages), itemsize, program)


TOPOLOGY = Topology(
    name="halving_doubling",
    summary="exchanges of halves at doubling distance: a ring's bytes in 2 log2 N moves",
    build=halving_doubling,
)

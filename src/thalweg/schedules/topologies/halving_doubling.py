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
from dataclasses import replace
from math import floor, log2

from thalweg.declarations import Variant
from thalweg.schedules import Group, Move, MoveKind, Schedule, Topology, all_reduce
from thalweg.schedules.chunks import split
from thalweg.schedules.closed_form import Cost, Phase, Symbols, cost
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


def halving_doubling_cost(x: Symbols) -> Cost:
    """Exchanges of S/2, S/4, ... at distance 1, 2, ..., and back (Rabenseifner). The first log2 G
    stay in the rack, and move (G-1)/G S; in the others all G members cross, with (C-1)/N S each:

        2 log2 N alpha;   2(G-1)/G S beta1 + 2(C-1)/C S max{beta2, beta1/G}

    The stages are sequential, so this is the time of a hierarchy without overlap. If N is no power
    of two, some members first send all of S to a neighbour and receive the result last: 2 moves
    and S in each direction more, on p = 2^floor(log2 N) members. Not in the table."""
    core = 1 << floor(log2(x.N))
    inside = min(core, 1 << floor(log2(x.G)))
    across = core // inside if x.C > 1 else 1
    inside = core // across
    guest = Phase(moves=1, nic=x.S) if core < x.N else Phase()
    near = Phase(moves=2 * floor(log2(inside)), nic=2 * (inside - 1) / inside * x.S)
    stages = 2 * floor(log2(across))
    far = Phase(
        moves=stages,
        crossings=stages,
        nic=2 * (across - 1) / core * x.S,
        uplink=2 * (across - 1) / across * x.S,
    )
    # A member with a guest first receives S from it and last sends it S: one in each direction.
    load = Phase(nic=near.nic + far.nic + guest.nic, uplink=far.uplink)
    whole = cost(replace(x, k=1), guest, near, far, guest, busiest=load)
    powers = all(number & (number - 1) == 0 for number in (x.C, x.G))
    return replace(whole, each=0.0, exact=powers)


TOPOLOGY = Topology(
    name="halving_doubling",
    summary="exchanges of halves at doubling distance: a ring's bytes in 2 log2 N moves",
    build=halving_doubling,
    form=halving_doubling_cost,
    variants=(Variant(text="halving_doubling", place=2),),
    is_calibrated=True,
)

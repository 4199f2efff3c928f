"""Sharded parameter server: the data is cut into shards, each summed and sent back by its server.

With a server on every rank, each NIC carries 2(N-1)/N of the data, as in a ring, in two sequential
moves of N-1 messages each; but nothing is added up on the way, so a rack of G sends G times what a
hierarchy would through its uplink. With few servers their NICs carry the load.
"""

from __future__ import annotations

from math import ceil, floor

from thalweg.declarations import Parameter, Variant
from thalweg.errors import LayoutError
from thalweg.schedules import Group, Schedule, Topology, all_reduce
from thalweg.schedules.chunks import in_pieces, pieces, split
from thalweg.schedules.closed_form import Cost, Phase, Symbols, cost
from thalweg.schedules.programs import direct


def ps(group: Group, elements: int, itemsize: int, step: int, servers: int | None) -> Schedule:
    count = group.size if servers is None else servers
    if count > group.size:
        raise LayoutError(
            f"ps has {count} servers but only {group.size} workers",
            f"give servers={group.size} or fewer",
        )
    spread = [group.order[i * group.size // count] for i in range(count)]  # over the racks
    serving = set(spread)
    order = (*spread, *(rank for rank in group.order if rank not in serving))
    shards = split(elements, count)
    sizes, spans = in_pieces(shards, pieces(group, shards[0] * itemsize, hops=2))
    return all_reduce("ps", group, sizes, itemsize, direct(order, spans))


def ps_cost(x: Symbols, servers: int | None = None) -> Cost:
    """P servers among the workers, spread over the racks. A server receives N-1 shards of S/P and
    sends as many results, and is a worker of the P-1 others. A rack with p servers sends G shards
    to each of the P-p others, and p shards to each of the N-G workers outside:

        NIC (N+P-2)/P S;   uplink [G (P-p) + p (N-G)]/P S  = 2 G (C-1)/C S  if p = P/C

    The table divides the uplink's bytes by P. That holds for one server per rack at most: no rack
    reduces before it sends, so G members send G times what a hierarchy does, however many shards
    there are."""
    count = x.N if servers is None else servers
    most, least = ceil(count / x.C), floor(count / x.C)
    one_way = max(x.G * (count - least), most * (x.N - x.G)) if x.C > 1 else 0
    both = max(x.G * (count - p) + p * (x.N - x.G) for p in (most, least)) if x.C > 1 else 0
    there = Phase(
        moves=x.N - 1,
        crossings=int(x.C > 1),
        nic=max((x.N - 1) / count, 1.0 if count < x.N else 0.0) * x.S,
        uplink=one_way / count * x.S,
    )
    load = Phase(moves=x.N - 1, nic=(x.N + count - 2) / count * x.S, uplink=both / count * x.S)
    return cost(x, there, there, busiest=load)


TOPOLOGY = Topology(
    name="ps",
    summary="shards of the data, each added up by its own server",
    build=ps,
    form=ps_cost,
    lanes=lambda group, servers: group.size if servers is None else servers,
    variants=(Variant(text="ps", place=6),),
    parameters={
        "servers": Parameter(
            kind=int, default=None, least=1, help="how many ranks serve; all of them if absent"
        )
    },
)

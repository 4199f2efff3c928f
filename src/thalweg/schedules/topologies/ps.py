"""Sharded parameter server: the data is cut into shards, each summed and sent back by its server.

With a server on every rank, each NIC carries 2(N-1)/N of the data, as in a ring, in two sequential
moves of N-1 messages each; but nothing is added up on the way, so a rack of G sends G times what a
hierarchy would through its uplink. With few servers their NICs carry the load.
"""

from __future__ import annotations

from thalweg.declarations import Parameter
from thalweg.errors import LayoutError
from thalweg.schedules import Group, Schedule, Topology, all_reduce
from thalweg.schedules.chunks import in_pieces, pieces, split
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


TOPOLOGY = Topology(
    name="ps",
    summary="shards of the data, each added up by its own server",
    build=ps,
    parameters={
        "servers": Parameter(
            kind=int, default=None, least=1, help="how many ranks serve; all of them if absent"
        )
    },
)

"""Uncoded master and workers (UMW): all ranks send data to a master, which broadcasts the sum.

The NIC of the master carries N-1 times the data each way: fine for a few workers or small messages.
The master is the best connected member. The data is cut into pieces, so that the master can
broadcast the first while others are still arriving.

The coded form (gradient coding, Tandon et al., ICML 2017) lets the master decode the full sum from
any N-s workers: a coded tree of one layer.
"""

from __future__ import annotations

from thalweg.declarations import Parameter
from thalweg.errors import LayoutError
from thalweg.schedules import Group, Schedule, Topology, all_reduce
from thalweg.schedules.chunks import in_pieces, pieces
from thalweg.schedules.closed_form import Cost, Phase, Symbols, cost
from thalweg.schedules.programs import down, in_turn, up
from thalweg.schedules.trees import heap, over


def star(group: Group, elements: int, itemsize: int, step: int, root: int | None) -> Schedule:
    """The schedule with `root` as the master; with the best connected member if that is None."""
    master = group.best_connected() if root is None else root
    if master not in group.ranks:
        raise LayoutError(f"root {master} is not in the group", f"choose one of {group.ranks}")
    others = [rank for rank in group.order if rank != master]
    tree = over((master, *others), heap(group.size))
    sizes, [spans] = in_pieces([elements], pieces(group, elements * itemsize, hops=2))
    return all_reduce("star", group, sizes, itemsize, in_turn(up(tree, spans), down(tree, spans)))


def star_cost(x: Symbols, root: int | None = None) -> Cost:
    """One master (UMW): N-1 times S come in through its NIC, N-G of them through its uplink, and
    as much goes out. With k chunks it answers the first while it receives the others, since NICs
    are full duplex:

        2(N-1) alpha for the first chunk;  (1 + 1/k) max{(N-1) S beta1, (N-G) S beta2}

    The table's PS with P = 1 adds what comes in, what goes out, and the two links."""
    outside = max(x.N - x.G, x.G) if x.C > 1 else 0  # another rack's uplink carries G times S
    there = Phase(moves=x.N - 1, crossings=int(x.C > 1), nic=(x.N - 1) * x.S, uplink=outside * x.S)
    return cost(x, there, there, busiest=there)


TOPOLOGY = Topology(
    name="star",
    summary="everybody sends to one master, which adds up and answers",
    build=star,
    form=star_cost,
    variants=(),  # the preset `umw` is
    is_calibrated=True,
    coded_fanout=lambda workers, root: workers,
    parameters={
        "root": Parameter(
            kind=int, default=None, least=0, help="the master's rank; the best connected if absent"
        )
    },
)

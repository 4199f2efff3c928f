"""All-reduce around a straggler (StragglAR, Devraj et al., arXiv 2505.23523, 2025): while the last
member is awaited, the n = N-1 others reduce-scatter among themselves. Then only its own S has to
come in.

Each of the n others owns a part, and has the sum of n contributions to it. It exchanges the part
with the straggler, and both complete it. Finished parts go round the ring of the others, piece by
piece. Pieces from all owners are under way at the same time, so once the straggler has come this
takes

    S beta (1 + (n-1)/(n k)) + about N messages

for parts in k pieces, where any all-reduce that begins then takes 2(N-1)/N S beta. The paper sends
a part in each of N-2 + log2 N rounds (N a power of two), so (N-2 + log2 N)/(N-1) S beta: it doubles
the holders of a part in every round, where pieces need no rounds, and any N will do.

Everybody else sends (2N-3)/(N-1) of the data. With a punctual straggler this takes up to a quarter
longer than a ring. It suits hosts behind one switch, since owners exchange with the straggler
across racks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, cycle

from thalweg.declarations import Parameter, Variant
from thalweg.errors import LayoutError
from thalweg.schedules import Group, Move, MoveKind, Schedule, Topology, all_reduce
from thalweg.schedules.chunks import in_pieces, pieces, split
from thalweg.schedules.closed_form import Cost, Phase, Symbols, cost
from thalweg.schedules.programs import in_turn, ring_gather, ring_reduce


def stragglar(
    group: Group, elements: int, itemsize: int, step: int, straggler: int | None
) -> Schedule:
    last = the_straggler(group, straggler)
    others = [rank for rank in group.order if rank != last]
    parts = split(elements, max(1, len(others)))
    sizes, spans = in_pieces(parts, pieces(group, parts[0] * itemsize, hops=2))

    def exchange(rank: int) -> Iterator[Move]:
        """The pieces of all owners by turns, so that the straggler serves them at the same time."""
        turns = chain.from_iterable(zip(*spans, strict=True))
        met = [(owner, span) for owner, span in zip(cycle(others), turns, strict=False)]
        own = [
            (last if rank == owner else owner, span) for owner, span in met if rank in (owner, last)
        ]
        for kind in (MoveKind.SEND, MoveKind.ADD):
            yield from (Move(kind, peer, *span) for peer, span in own)

    program = in_turn(ring_reduce(others, spans), exchange, ring_gather(others, spans))
    return all_reduce("stragglar", group, sizes, itemsize, program)


def the_straggler(group: Group, straggler: int | None = None) -> int:
    """The given rank; else the member that is late longest on average, the last of equals."""
    if straggler is None:
        lates = {rank: group.cluster.host(rank).late for rank in group.ranks}
        return max(
            lates, key=lambda rank: (lates[rank].probability * lates[rank].delay.seconds, rank)
        )
    if straggler not in group.ranks:
        raise LayoutError(f"rank {straggler} is not in the group", f"choose one of {group.ranks}")
    return straggler


def ring_phase(x: Symbols) -> Phase:
    """One half of a ring all-reduce among the N-1 others."""
    moves = x.N - 2
    share = moves / (x.N - 1) * x.S
    racks = x.C if x.G > 1 else x.C - 1
    is_across = racks > 1
    return Phase(
        moves=moves,
        crossings=min(moves, racks) if is_across else 0,
        nic=share,
        uplink=share if is_across else 0.0,
    )


def stragglar_cost(x: Symbols, straggler: int | None = None) -> Cost:
    """Reduce-scatter among the n = N-1 others, exchange with the straggler, all-gather:

        (2N-3) alpha;   (2n-1)/n S beta1 + (n-1)/n S beta1/k

    Between racks, the straggler exchanges G (C-1)/n S through its uplink, besides what the rings
    carry there if it isn't alone in its rack."""
    if x.N == 1:
        return cost(x)
    ring, across = ring_phase(x), int(x.C > 1)
    abroad, own = x.G * (x.C - 1) / (x.N - 1) * x.S, x.G / (x.N - 1) * x.S * across
    meeting = Phase(moves=1, crossings=across, nic=x.S, uplink=abroad)
    busiest = Phase(
        moves=1,
        nic=ring.nic + x.S,
        uplink=max(abroad + 2 * ring.uplink * (x.G > 1), own + 2 * ring.uplink),
    )
    return cost(x, ring, meeting, ring, busiest=busiest)


def before_straggler(x: Symbols, straggler: int | None = None) -> Cost:
    """The reduce-scatter among the others."""
    return cost(replace(x, k=1), ring_phase(x)) if x.N > 1 else cost(x)


TOPOLOGY = Topology(
    name="stragglar",
    summary="the others reduce-scatter while a straggler is awaited",
    build=stragglar,
    form=stragglar_cost,
    lanes=lambda group, straggler: max(1, group.size - 1),
    straggler=the_straggler,
    before_straggler=before_straggler,
    variants=(Variant(text="stragglar", straggler=True),),
    parameters={
        "straggler": Parameter(
            kind=int, default=None, least=0, help="its rank; the latest in the cluster if absent"
        )
    },
)

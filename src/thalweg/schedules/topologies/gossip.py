"""Gossip: everybody averages with a neighbour or two, and what it learnt goes on at the next step.

`graph=ring`: both neighbours, weights 1/3 (D-PSGD, Lian et al., NeurIPS 2017): 2 S sent at every
step, and knowledge that travels one hop a step. `graph=exponential`: one peer, at distance 1, 2, 4,
... by turns (Ying et al., NeurIPS 2021): S sent, and after log2 N steps everybody has heard of
everybody, with equal weights if N is a power of two. Both mixing matrices are doubly stochastic,
so the mean over all ranks is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from thalweg.declarations import Parameter, Variant
from thalweg.schedules import Condition, Group, Move, MoveKind, Schedule, Topology
from thalweg.schedules.closed_form import Cost, Phase, Symbols, cost
from thalweg.schedules.collectives import OWN_EVERYWHERE


def gossip(group: Group, elements: int, itemsize: int, step: int, graph: str) -> Schedule:
    order = group.order
    position = {rank: p for p, rank in enumerate(order)}
    ahead = _distances(group.size, step, graph)  # to whom; from whom is the other way round

    def peers(rank: int, sign: int) -> list[int]:
        return [order[(position[rank] + sign * distance) % group.size] for distance in ahead]

    def program(rank: int) -> Iterator[Move]:
        for peer in peers(rank, +1):
            yield Move(MoveKind.SEND, peer, 0, 1)
        for peer in peers(rank, -1):
            yield Move(MoveKind.ADD, peer, 0, 1)

    return Schedule(
        name="gossip",
        ranks=group.ranks,
        sizes=(elements,),
        itemsize=itemsize,
        program=program,
        before=OWN_EVERYWHERE,
        after=Condition(
            "everybody holds the sum of its own and its neighbours'",
            lambda rank, _: sum(1 << peer for peer in {rank, *peers(rank, -1)}),
        ),
    )


def _distances(size: int, step: int, graph: str) -> list[int]:
    if graph == "ring":
        return sorted({1, size - 1} - {0, size})
    turns = (size - 1).bit_length()
    return [1 << step % turns] if turns else []


def gossip_cost(x: Symbols, graph: str = "ring") -> Cost:
    """S to both neighbours in a ring in the order of the racks, and S from both:

        2 alpha;   2 S max{beta1, beta2}      (half of both if there are two members)

    The table has four times S; but links are full duplex, so sends don't delay receives."""
    if graph == "exponential":
        return exponential_cost(x)
    peers, racks = min(x.N - 1, 2), int(x.C > 1)
    sent = peers * x.S
    return cost(replace(x, k=1), Phase(moves=peers, crossings=racks, nic=sent, uplink=racks * sent))


def exponential_cost(x: Symbols) -> Cost:
    """The cost at a turn, or the mean over all distances."""
    turns = max(1, (x.N - 1).bit_length())
    if x.turn is not None:
        return distance_cost(x, 1 << x.turn % turns)
    each = [distance_cost(x, 1 << turn) for turn in range(turns)]
    transfer, busiest = fmean(one.transfer for one in each), fmean(one.busiest for one in each)
    return replace(each[0], transfer=transfer, busiest=busiest)


def distance_cost(x: Symbols, distance: int) -> Cost:
    """S to the member at this distance in the order of the racks. A rack's member crosses the
    uplink if its peer isn't in the rack: all G do, unless d or N-d is less than G.

        alpha;   S max{beta1, min(G, d, N-d) beta2}

    One-peer exponential gossip cycles through d = 1, 2, 4, ...; not in the table."""
    if x.N == 1:
        return cost(x)
    leaving, racks = min(x.G, distance, x.N - distance), int(x.C > 1)
    uplink = racks * leaving * x.S
    return cost(replace(x, k=1), Phase(moves=1, crossings=racks, nic=x.S, uplink=uplink))


TOPOLOGY = Topology(
    name="gossip",
    summary="everybody averages with neighbours only",
    build=gossip,
    form=gossip_cost,
    variants=(
        Variant(text="gossip", compressed=True),
        Variant(text="gossip(graph=exponential)", compressed=True),
    ),
    period=lambda group: max(1, (group.size - 1).bit_length()),
    mixes=True,
    parameters={
        "graph": Parameter(
            kind=str,
            default="ring",
            choices=("ring", "exponential"),
            help="ring: both neighbours; exponential: one peer at doubling distance, by turns",
        )
    },
)

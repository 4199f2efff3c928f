"""Gossip: everybody averages with a neighbour or two, and what it learnt goes on at the next step.

`graph=ring`: both neighbours, weights 1/3 (D-PSGD, Lian et al., NeurIPS 2017): 2 S sent at every
step, and knowledge that travels one hop a step. `graph=exponential`: one peer, at distance 1, 2, 4,
... by turns (Ying et al., NeurIPS 2021): S sent, and after log2 N steps everybody has heard of
everybody, with equal weights if N is a power of two. Both mixing matrices are doubly stochastic,
so the mean over all ranks is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from thalweg.declarations import Parameter
from thalweg.schedules import Condition, Group, Move, MoveKind, Schedule, Topology
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


TOPOLOGY = Topology(
    name="gossip",
    summary="everybody averages with neighbours only",
    build=gossip,
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

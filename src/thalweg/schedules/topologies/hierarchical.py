"""All-reduce in two levels, so that an uplink carries 2(C-1)/C of the data for C racks, the least
there is, however many hosts are behind it.

`form=parallel`: reduce-scatter in each rack, all-reduce between the racks of every part by those
who own it there, all-gather in each rack. All NICs work, and a fat uplink is filled by G flows.
Racks may be uneven: the data is cut at every multiple of 1/G for each rack size G, so each member
of a rack owns an equal share of it, and every piece has one owner in every rack.

`form=leader`: each rack adds up along a chain that ends at its leader, the leaders form a ring,
the result goes back along the chain.

`compress=between`: a compressor works between the racks alone, where links are slow, on what each
rack has added up without loss. That is several rounds, which `thalweg.steps` makes.

Slabs of the data go through the phases one after the other, so that the racks, the uplinks and the
racks again are busy at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from thalweg.declarations import Parameter
from thalweg.schedules import Group, Program, Schedule, Topology, all_reduce
from thalweg.schedules.chunks import pieces, singles, split
from thalweg.schedules.moves import Span
from thalweg.schedules.programs import down, in_turn, ring_gather, ring_reduce, up
from thalweg.schedules.trees import heap, over

COMPRESS_BETWEEN = "between"


def hierarchical(
    group: Group, elements: int, itemsize: int, step: int, form: str, **_: object
) -> Schedule:
    members, racks = max(map(len, group.racks)), len(group.racks)
    ring_moves = 2 * (racks - 1)
    if form == "leader":  # the leaders' ring is one long hop of a chain there and back
        build, hops, messages = _leader_slab, 2 * (members - 1) + 1, max(ring_moves, 1)
    else:  # three phases; a rack alone has no second one to overlap with
        build, hops, messages = _parallel_slab, 3 if racks > 1 else 1, max(members - 1, ring_moves)
    sizes: list[int] = []
    programs: list[Program] = []
    for slab in split(elements, pieces(group, elements * itemsize, hops, messages)):
        slab_sizes, program = build(group, slab, first=len(sizes))
        sizes += slab_sizes
        programs.append(program)
    return all_reduce("hierarchical", group, sizes, itemsize, in_turn(*programs))


def _leader_slab(group: Group, elements: int, first: int) -> tuple[list[int], Program]:
    sizes = split(elements, len(group.racks))
    chains = [over(rack, heap(1)) for rack in group.racks]
    whole = [(first, first + len(sizes))]
    leaders = [rack[0] for rack in group.racks]
    parts = [[span] for span in singles(*whole[0])]
    return sizes, in_turn(
        *(up(chain, whole) for chain in chains),
        ring_reduce(leaders, parts),
        ring_gather(leaders, parts),
        *(down(chain, whole) for chain in chains),
    )


def _parallel_slab(group: Group, elements: int, first: int) -> tuple[list[int], Program]:
    shares = _shares([len(rack) for rack in group.racks])
    cuts = [int(elements * share) for share in shares]
    racks = len(group.racks)
    sizes = [size for low, high in pairwise(cuts) for size in split(high - low, racks)]
    stretch = [(first + i * racks, first + (i + 1) * racks) for i in range(len(cuts) - 1)]
    inside = [_owned(len(rack), shares, stretch) for rack in group.racks]
    between: list[Program] = []
    for share, span in zip(shares, stretch, strict=False):
        owners = [rack[int(share * len(rack))] for rack in group.racks]
        parts = [[single] for single in singles(*span)]
        between += [ring_reduce(owners, parts), ring_gather(owners, parts)]
    return sizes, in_turn(
        *(ring_reduce(rack, parts) for rack, parts in zip(group.racks, inside, strict=True)),
        *between,
        *(ring_gather(rack, parts) for rack, parts in zip(group.racks, inside, strict=True)),
    )


def _shares(rack_sizes: Sequence[int]) -> list[Fraction]:
    """Every multiple of 1/G from 0 to 1, for every rack size G."""
    return sorted({Fraction(i, size) for size in rack_sizes for i in range(size + 1)})


def _owned(members: int, shares: list[Fraction], stretch: list[Span]) -> list[list[Span]]:
    """The equal share of the data of each member of a rack, as one span."""
    bounds = [shares.index(Fraction(i, members)) for i in range(members + 1)]
    return [[(stretch[low][0], stretch[high - 1][1])] for low, high in pairwise(bounds)]


TOPOLOGY = Topology(
    name="hierarchical",
    summary="inside the racks, then between them: an uplink carries as little as it can",
    build=hierarchical,
    parameters={
        "form": Parameter(
            kind=str,
            default="parallel",
            choices=("parallel", "leader"),
            help="parallel: all members talk to the other racks; leader: one for each rack",
        ),
        "compress": Parameter(
            kind=str,
            default="everywhere",
            choices=("everywhere", COMPRESS_BETWEEN),
            help="everywhere, or only what goes between racks",
        ),
    },
)

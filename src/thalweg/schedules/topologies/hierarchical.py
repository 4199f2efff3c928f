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

from thalweg.declarations import Parameter, Variant
from thalweg.schedules import Group, Program, Schedule, Topology, all_reduce
from thalweg.schedules.chunks import pieces, singles, split
from thalweg.schedules.closed_form import Cost, Phase, Symbols, cost
from thalweg.schedules.moves import Span
from thalweg.schedules.programs import down, in_turn, ring_gather, ring_reduce, up
from thalweg.schedules.topology import COMPRESS_BETWEEN
from thalweg.schedules.trees import heap, over


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


def hierarchical_cost(x: Symbols, form: str = "parallel", **_: object) -> Cost:
    """Reduce-scatter in the racks, all-reduce of each part between its owners, all-gather:

        2(G+C-2) alpha;   2(G-1)/G S beta1 + 2(C-1)/C S max{beta2, beta1/G}   with k = 1,
        max{ [2(G-1)/G + 2(C-1)/N] S beta1, 2(C-1)/C S beta2 }                as k grows

    The table has the first, without overlap: NICs idle while the uplinks are busy. An uplink
    carries as much as with DS-Sync's whole inter-rack group; no all-reduce sends less."""
    if form == "leader":
        return leaders_cost(x)
    inside = Phase(moves=x.G - 1, nic=(x.G - 1) / x.G * x.S)
    across = Phase(
        moves=2 * (x.C - 1),
        crossings=2 * (x.C - 1),
        nic=2 * (x.C - 1) / x.C * x.S / x.G,
        uplink=2 * (x.C - 1) / x.C * x.S,
    )
    return cost(x, inside, across, inside)


def leaders_cost(x: Symbols) -> Cost:
    """A chain in each rack reduces to its leader, the leaders form a ring, and the chain broadcasts
    the result: 2(G-1) hops of S, and 2(C-1)/C S through a leader's NIC and uplink besides.

        2(G+C-2) alpha;   2(G-1) S beta1 + 2(C-1)/C S max{beta1, beta2}       with k = 1,
        max{ 2 S beta1, [1 + 2(C-1)/C] S beta1, 2(C-1)/C S beta2 }            as k grows

    The table's 2(G-1)/G S beta1 would be a ring in the rack, which leaves no sum at the leader
    without S (G-1)/G more to gather it."""
    chain, share = x.G - 1, 2 * (x.C - 1) / x.C * x.S
    hop = Phase(moves=1, nic=x.S)
    leaders = Phase(moves=2 * (x.C - 1), crossings=2 * (x.C - 1), nic=share, uplink=share)
    in_chain = min(chain, 2) * x.S  # an inner member sends in both directions
    nic = max(in_chain, min(chain, 1) * x.S + share)
    load = Phase(moves=max(1, leaders.moves), nic=nic, uplink=share)
    return cost(x, *[hop] * chain, leaders, *[hop] * chain, busiest=load)


def lanes(group: Group, form: str = "parallel", **_: object) -> int:
    """The chunks of a slab, which are in different rings."""
    parts = {i / len(rack) for rack in group.racks for i in range(len(rack))}
    return len(group.racks) * (1 if form == "leader" else len(parts))


TOPOLOGY = Topology(
    name="hierarchical",
    summary="inside the racks, then between them: an uplink carries as little as it can",
    build=hierarchical,
    form=hierarchical_cost,
    lanes=lanes,
    variants=(
        Variant(text="hierarchical", several_racks=True, compressed=True, place=8),
        Variant(text="hierarchical(form=leader)", several_racks=True, place=8),
        Variant(
            text="hierarchical(compress=between)",
            several_racks=True,
            compressed=True,
            alone=False,
            place=8,
        ),
    ),
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

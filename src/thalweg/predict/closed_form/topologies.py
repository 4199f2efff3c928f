"""What each way of synchronising costs, in closed form, on even racks with full-duplex links.

Every form says which bytes its busiest NIC and uplink carry, in how many sequential moves, and what
can't overlap. Where Table II of DS-Sync has another term, the docstring says why.
Costs are those of messages and bytes alone: nothing is said of adding up, of compressing, of TCP's
headers, or of what it makes of many flows on one link.

In a tree, whatever climbs comes down the same edge, so in each direction a node's NIC carries its
degree times the tree's data, and a rack's uplink the rack's degree among the racks. A chunk takes
`depth` hops up and as many down; at a hop, a parent takes its children's chunks in through one NIC.
Each further chunk costs two moves, one on the way up and one on the way down:

    2(depth + k - 1) alpha;   (1 - 1/k) degree S beta  +  2 depth children S beta / k

The table has 2(log N + k) (alpha + S beta2/k) for the double tree. With its degrees of two in full
and two children that send half of S each, this is right for one rack of an even number of members,
but for one chunk too many. Over racks the depth is that of the racks' tree and of the tree in a
rack, ceil(log2 C) + ceil(log2 G), and a rack's root has children in both, so its NIC carries up to
2.5 S.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, floor, log2

from thalweg.predict.closed_form.symbols import Cost, Phase, Symbols, cost
from thalweg.schedules.trees import Tree, TreeShape, binary, complement, heap, over, over_racks


def star(x: Symbols) -> Cost:
    """One master (UMW): N-1 times S come in through its NIC, N-G of them through its uplink, and
    as much goes out. In k chunks it answers the first while the rest is still coming, in and out
    being two directions:

        2(N-1) alpha for the first chunk;  (1 + 1/k) max{(N-1) S beta1, (N-G) S beta2}

    The table's PS with P = 1 adds what comes in, what goes out, and the two links."""
    outside = max(x.N - x.G, x.G) if x.C > 1 else 0  # another rack's uplink carries G times S
    there = Phase(moves=x.N - 1, crossings=int(x.C > 1), nic=(x.N - 1) * x.S, uplink=outside * x.S)
    return cost(x, there, there, busiest=there)


def ps(x: Symbols) -> Cost:
    """P servers among the workers, spread over the racks. A server takes N-1 shards of S/P and
    gives them back, and takes part as a worker with the P-1 others. A rack with p servers sends G
    shards to each of the P-p others, and p shards to each of the N-G workers outside:

        NIC (N+P-2)/P S;   uplink [G (P-p) + p (N-G)]/P S  = 2 G (C-1)/C S  if p = P/C

    The table divides the uplink's bytes by P. That holds while there is one server to a rack at
    most: nothing is added up on the way, so G members send G times what a hierarchy does, into
    however many shards it is cut."""
    most, least = ceil(x.P / x.C), floor(x.P / x.C)
    one_way = max(x.G * (x.P - least), most * (x.N - x.G)) if x.C > 1 else 0
    both = max(x.G * (x.P - p) + p * (x.N - x.G) for p in (most, least)) if x.C > 1 else 0
    there = Phase(
        moves=x.N - 1,
        crossings=int(x.C > 1),
        nic=max((x.N - 1) / x.P, 1.0 if x.P < x.N else 0.0) * x.S,
        uplink=one_way / x.P * x.S,
    )
    load = Phase(moves=x.N - 1, nic=(x.N + x.P - 2) / x.P * x.S, uplink=both / x.P * x.S)
    return cost(x, there, there, busiest=load)


def ring(x: Symbols, leaving: int = 1) -> Cost:
    """Everybody sends 2(N-1) parts of S/N, and receives as many (Patarasuk and Yuan, 2009):

        2(N-1) alpha;   2(N-1)/N S max{beta1, r beta2}

    where r, `leaving`, is how many members of a rack are followed by one of another rack. A ring
    that follows the racks leaves each once; one that goes round them leaves at every hop, r = G.
    The table has r = 1, and beta2 for max{beta1, beta2}."""
    share = 2 * (x.N - 1) / x.N * x.S
    crossings = min(2 * (x.N - 1), 2 * x.C * leaving) if x.C > 1 else 0
    uplink = share * leaving if x.C > 1 else 0.0
    return cost(
        replace(x, k=1),
        Phase(moves=2 * (x.N - 1), crossings=crossings, nic=share, uplink=uplink),
    )


def halving_doubling(x: Symbols) -> Cost:
    """Exchanges of S/2, S/4, ... at distance 1, 2, ..., and back (Rabenseifner). The first log2 G
    stay in the rack, and move (G-1)/G S; in the others all G members cross, with (C-1)/N S each:

        2 log2 N alpha;   2(G-1)/G S beta1 + 2(C-1)/C S max{beta2, beta1/G}

    The stages are one after the other, so this is what a hierarchy takes whose phases don't
    overlap. If N is no power of two, some give all they have to a neighbour first, and get the
    result last: 2 moves and S each way more, on p = 2^floor(log2 N) members. Not in the table."""
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
    # one who has a guest takes S from it first and gives it S last: one of them in each direction
    load = Phase(nic=near.nic + far.nic + guest.nic, uplink=far.uplink)
    return cost(replace(x, k=1), guest, near, far, guest, busiest=load)


def hierarchical(x: Symbols) -> Cost:
    """Reduce-scatter in the racks, all-reduce of every part between its owners, all-gather:

        2(G+C-2) alpha;   2(G-1)/G S beta1 + 2(C-1)/C S max{beta2, beta1/G}   with k = 1,
        max{ [2(G-1)/G + 2(C-1)/N] S beta1, 2(C-1)/C S beta2 }                as k grows

    The table has the first. It overlaps nothing: the racks idle while the uplinks work. An uplink
    carries as much as with DS-Sync's whole inter-rack group; no all-reduce sends less."""
    inside = Phase(moves=x.G - 1, nic=(x.G - 1) / x.G * x.S)
    across = Phase(
        moves=2 * (x.C - 1),
        crossings=2 * (x.C - 1),
        nic=2 * (x.C - 1) / x.C * x.S / x.G,
        uplink=2 * (x.C - 1) / x.C * x.S,
    )
    return cost(x, inside, across, inside)


def hierarchical_by_leaders(x: Symbols) -> Cost:
    """A chain in each rack ends at its leader, the leaders form a ring, and the chain brings the
    result back: 2(G-1) hops of S, and 2(C-1)/C S through a leader's NIC and uplink besides.

        2(G+C-2) alpha;   2(G-1) S beta1 + 2(C-1)/C S max{beta1, beta2}       with k = 1,
        max{ 2 S beta1, [1 + 2(C-1)/C] S beta1, 2(C-1)/C S beta2 }            as k grows

    The table's 2(G-1)/G S beta1 would be a ring in the rack, which leaves no sum at the leader
    without S (G-1)/G more to gather it."""
    chain, share = x.G - 1, 2 * (x.C - 1) / x.C * x.S
    hop = Phase(moves=1, nic=x.S)
    leaders = Phase(moves=2 * (x.C - 1), crossings=2 * (x.C - 1), nic=share, uplink=share)
    in_chain = min(chain, 2) * x.S  # one who isn't at an end sends up and down
    load = Phase(
        moves=max(1, leaders.moves),
        nic=max(in_chain, min(chain, 1) * x.S + share),
        uplink=share,
    )
    return cost(x, *[hop] * chain, leaders, *[hop] * chain, busiest=load)


def all_gather(x: Symbols) -> Cost:
    """Round a ring that follows the racks, S being what everybody has in the end:

        (N-1) alpha;   (N-1)/N S max{beta1, beta2}

    Compressed payloads that can't be added are gathered so: N of them, S = N times one."""
    share = (x.N - 1) / x.N * x.S
    crossings, uplink = (min(x.N - 1, x.C), share) if x.C > 1 else (0, 0.0)
    return cost(
        replace(x, k=1), Phase(moves=x.N - 1, crossings=crossings, nic=share, uplink=uplink)
    )


def all_to_all(x: Symbols) -> Cost:
    """Everybody sends an N-th of its S to each of the others. Nothing is added up on the way, so
    all that a rack's G members have for the N-G others goes through its uplink:

        (N-1) alpha;   S max{ (N-1)/N beta1, G (N-G)/N beta2 }

    The first of the two shots of a compressor; an all-gather of as much is the second."""
    outside = x.G * (x.N - x.G) / x.N * x.S if x.C > 1 else 0.0
    there = Phase(moves=x.N - 1, crossings=int(x.C > 1), nic=(x.N - 1) / x.N * x.S, uplink=outside)
    return cost(replace(x, k=1), there)


def chain(x: Symbols) -> Cost:
    """S from one end of a line of N to the other, or all sums to one end, in a rack: N-1 hops,
    each over links of its own.

        (N+k-2) (alpha + S beta1/k)"""
    hop = Phase(moves=1, nic=x.S)
    return cost(x, *[hop] * (x.N - 1), busiest=hop if x.N > 1 else Phase())


def gossip(x: Symbols) -> Cost:
    """S to both neighbours in a ring that follows the racks, and S from both:

        2 alpha;   2 S max{beta1, beta2}      (half of both if there are two members)

    Twice, not four times S as in the table: what comes in doesn't hold up what goes out."""
    neighbours = min(x.N - 1, 2)
    uplink = neighbours * x.S if x.C > 1 else 0.0
    return cost(
        replace(x, k=1),
        Phase(moves=neighbours, crossings=int(x.C > 1), nic=neighbours * x.S, uplink=uplink),
    )


def gossip_exponential(x: Symbols, distance: int) -> Cost:
    """S to the member at this distance in the order of the racks. Of a rack's G members, those
    cross whose peer isn't in it: all, unless the distance or the way round is shorter than G.

        alpha;   S max{beta1, min(G, d, N-d) beta2}

    One-peer exponential gossip has d = 1, 2, 4, ... by turns; not in the table."""
    if x.N == 1:
        return cost(x)
    leaving = min(x.G, distance, x.N - distance) if x.C > 1 else 0
    return cost(
        replace(x, k=1),
        Phase(moves=1, crossings=int(x.C > 1), nic=x.S, uplink=leaving * x.S),
    )


def tree(x: Symbols, fanout: int) -> Cost:
    """Everybody has up to `fanout` children in its rack, and the racks' roots as many racks. A
    single tree leaves one direction of the leaves' NICs idle. Not in the table."""
    return _trees(x, [heap(fanout)])


def double_tree(x: Symbols) -> Cost:
    """Half of S on each of two binary trees, in which the leaves of one are inner in the other."""
    return _trees(x, [binary, complement])


def _trees(x: Symbols, shapes: Sequence[TreeShape]) -> Cost:
    """S in equal parts on trees of these shapes, side by side."""
    part = x.S / len(shapes)
    racks = [tuple(range(rack * x.G, (rack + 1) * x.G)) for rack in range(x.C)]
    whole = [over_racks(racks, shape) for shape in shapes]
    between = [over(tuple(range(x.C)), shape) for shape in shapes]
    inside = [over(tuple(range(x.G)), shape) for shape in shapes]
    far = Phase(
        moves=1,
        crossings=1,
        nic=part * _most_children(between),
        uplink=part * _most_children(between),
    )
    near = Phase(moves=1, nic=part * _most_children(inside))
    load = Phase(moves=2, nic=part * _busiest_degree(whole), uplink=part * _busiest_degree(between))
    way = [far] * max(t.depth for t in between) + [near] * max(t.depth for t in inside)
    return cost(x, *way, *way, busiest=load)


def _most_children(trees: Sequence[Tree]) -> int:
    return max(len(children) for tree in trees for children in tree.children.values())


def _busiest_degree(trees: Sequence[Tree]) -> int:
    """Edges of a node in all trees together, of the node that has the most."""
    degrees: Counter[int] = Counter()
    for tree in trees:
        for child, parent in tree.parent.items():
            degrees.update((child, parent))
    return max(degrees.values(), default=0)

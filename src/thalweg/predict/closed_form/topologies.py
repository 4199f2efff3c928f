"""The closed-form cost of each topology on even racks with full-duplex links.

Every form gives the bytes on its busiest NIC and uplink, the number of sequential moves, and the
phases that can't overlap. Where Table II of DS-Sync has another term, the docstring says why.
Forms count messages and bytes only: no additions, no compression, no TCP headers, and no bandwidth
lost to many flows on one link.

In a tree, the sums go up and the results go down the same edges, so in each direction a node's NIC
carries its degree times the tree's data, and a rack's uplink the rack's degree among the racks. A
chunk takes `depth` hops up and as many down; at a hop, a parent receives its children's chunks
through one NIC. Each further chunk costs two moves, one up and one down:

    2(depth + k - 1) alpha;   (1 - 1/k) degree S beta  +  2 depth children S beta / k

The table has 2(log N + k) (alpha + S beta2/k) for the double tree. With its degrees of two in full
and two children that send half of S each, this is right for one rack of an even number of members,
but for one chunk too many. Over racks the depth is that of the racks' tree and of the tree in a
rack, ceil(log2 C) + ceil(log2 G), and a rack's root has children in both, so its NIC carries up to
2.5 S.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, floor, log2
from statistics import fmean

from thalweg.declarations import Value
from thalweg.predict.closed_form.symbols import Cost, Phase, Symbols, cost
from thalweg.schedules import Group
from thalweg.schedules.trees import Tree, TreeShape, binary, complement, heap, over, over_racks

ClosedForm = Callable[[Symbols], Cost]


def star(x: Symbols) -> Cost:
    """One master (UMW): N-1 times S come in through its NIC, N-G of them through its uplink, and
    as much goes out. With k chunks it answers the first while it receives the others, since NICs
    are full duplex:

        2(N-1) alpha for the first chunk;  (1 + 1/k) max{(N-1) S beta1, (N-G) S beta2}

    The table's PS with P = 1 adds what comes in, what goes out, and the two links."""
    outside = max(x.N - x.G, x.G) if x.C > 1 else 0  # another rack's uplink carries G times S
    there = Phase(moves=x.N - 1, crossings=int(x.C > 1), nic=(x.N - 1) * x.S, uplink=outside * x.S)
    return cost(x, there, there, busiest=there)


def ps(x: Symbols) -> Cost:
    """P servers among the workers, spread over the racks. A server receives N-1 shards of S/P and
    sends as many results, and is a worker of the P-1 others. A rack with p servers sends G shards
    to each of the P-p others, and p shards to each of the N-G workers outside:

        NIC (N+P-2)/P S;   uplink [G (P-p) + p (N-G)]/P S  = 2 G (C-1)/C S  if p = P/C

    The table divides the uplink's bytes by P. That holds for one server per rack at most: no rack
    reduces before it sends, so G members send G times what a hierarchy does, however many shards
    there are."""
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
    """Every member sends 2(N-1) parts of S/N, and receives as many (Patarasuk and Yuan, 2009):

        2(N-1) alpha;   2(N-1)/N S max{beta1, r beta2}

    where r, `leaving`, is the number of members of a rack whose successor is in another rack. A
    ring in the order of the racks leaves each once; one that alternates between racks leaves at
    every hop, r = G. The table has r = 1, and beta2 for max{beta1, beta2}."""
    moves, share = 2 * (x.N - 1), 2 * (x.N - 1) / x.N * x.S
    crossings = min(moves, 2 * x.C * leaving) if x.C > 1 else 0
    uplink = share * leaving if x.C > 1 else 0.0
    return cost(replace(x, k=1), Phase(moves=moves, crossings=crossings, nic=share, uplink=uplink))


def halving_doubling(x: Symbols) -> Cost:
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
    return cost(replace(x, k=1), guest, near, far, guest, busiest=load)


def hierarchical(x: Symbols) -> Cost:
    """Reduce-scatter in the racks, all-reduce of each part between its owners, all-gather:

        2(G+C-2) alpha;   2(G-1)/G S beta1 + 2(C-1)/C S max{beta2, beta1/G}   with k = 1,
        max{ [2(G-1)/G + 2(C-1)/N] S beta1, 2(C-1)/C S beta2 }                as k grows

    The table has the first, without overlap: NICs idle while the uplinks are busy. An uplink
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


def all_gather(x: Symbols) -> Cost:
    """A ring in the order of the racks, S being the bytes that every member has in the end:

        (N-1) alpha;   (N-1)/N S max{beta1, beta2}

    Payloads that can't be summed are gathered by it: N of them, S = N times one."""
    moves, share = x.N - 1, (x.N - 1) / x.N * x.S
    crossings, uplink = (min(moves, x.C), share) if x.C > 1 else (0, 0.0)
    return cost(replace(x, k=1), Phase(moves=moves, crossings=crossings, nic=share, uplink=uplink))


def all_to_all(x: Symbols) -> Cost:
    """Every member sends an N-th of its S to each of the others. No rack reduces before it sends,
    so all messages of a rack's G members to the N-G others go through its uplink:

        (N-1) alpha;   S max{ (N-1)/N beta1, G (N-G)/N beta2 }

    A two-shot exchange of compressed payloads is this and an all-gather of as many bytes."""
    outside = x.G * (x.N - x.G) / x.N * x.S if x.C > 1 else 0.0
    there = Phase(moves=x.N - 1, crossings=int(x.C > 1), nic=(x.N - 1) / x.N * x.S, uplink=outside)
    return cost(replace(x, k=1), there)


def chain(x: Symbols) -> Cost:
    """A chain of N members in a rack that broadcasts S, or reduces to one end: N-1 hops, each over
    links of its own.

        (N+k-2) (alpha + S beta1/k)"""
    hop = Phase(moves=1, nic=x.S)
    return cost(x, *[hop] * (x.N - 1), busiest=hop if x.N > 1 else Phase())


def gossip(x: Symbols) -> Cost:
    """S to both neighbours in a ring in the order of the racks, and S from both:

        2 alpha;   2 S max{beta1, beta2}      (half of both if there are two members)

    The table has four times S; but links are full duplex, so sends don't delay receives."""
    peers, racks = min(x.N - 1, 2), int(x.C > 1)
    sent = peers * x.S
    return cost(replace(x, k=1), Phase(moves=peers, crossings=racks, nic=sent, uplink=racks * sent))


def gossip_exponential(x: Symbols, distance: int) -> Cost:
    """S to the member at this distance in the order of the racks. A rack's member crosses the
    uplink if its peer isn't in the rack: all G do, unless d or N-d is less than G.

        alpha;   S max{beta1, min(G, d, N-d) beta2}

    One-peer exponential gossip cycles through d = 1, 2, 4, ...; not in the table."""
    if x.N == 1:
        return cost(x)
    leaving, racks = min(x.G, distance, x.N - distance), int(x.C > 1)
    uplink = racks * leaving * x.S
    return cost(replace(x, k=1), Phase(moves=1, crossings=racks, nic=x.S, uplink=uplink))


def _all_distances(x: Symbols) -> Cost:
    """The mean cost of one-peer exponential gossip over its distances."""
    turns = [gossip_exponential(x, 1 << turn) for turn in range((x.N - 1).bit_length())]
    transfer, busiest = fmean(t.transfer for t in turns), fmean(t.busiest for t in turns)
    return replace(turns[0], transfer=transfer, busiest=busiest)


def tree(x: Symbols, fanout: int) -> Cost:
    """A tree in which each member has up to `fanout` children in its rack, and each rack's root as
    many racks. It leaves one direction of the leaves' NICs idle. Not in the table."""
    return _trees(x, [heap(fanout)])


def double_tree(x: Symbols) -> Cost:
    """Half of S on each of two binary trees, in which the leaves of one are inner in the other."""
    return _trees(x, [binary, complement])


def _trees(x: Symbols, shapes: Sequence[TreeShape]) -> Cost:
    """The cost of S in equal parts on trees of these shapes, side by side."""
    part = x.S / len(shapes)
    racks = [tuple(range(rack * x.G, (rack + 1) * x.G)) for rack in range(x.C)]
    whole = [over_racks(racks, shape) for shape in shapes]
    between = [over(tuple(range(x.C)), shape) for shape in shapes]
    inside = [over(tuple(range(x.G)), shape) for shape in shapes]
    received = part * _most_children(between)
    far = Phase(moves=1, crossings=1, nic=received, uplink=received)
    near = Phase(moves=1, nic=part * _most_children(inside))
    load = Phase(moves=2, nic=part * _busiest_degree(whole), uplink=part * _busiest_degree(between))
    up = [far] * max(t.depth for t in between) + [near] * max(t.depth for t in inside)
    return cost(x, *up, *up, busiest=load)


def _most_children(trees: Sequence[Tree]) -> int:
    return max(len(children) for tree in trees for children in tree.children.values())


def _busiest_degree(trees: Sequence[Tree]) -> int:
    """The largest number of edges that a node has in all trees together."""
    degrees = Counter(node for tree in trees for edge in tree.parent.items() for node in edge)
    return max(degrees.values(), default=0)


CLOSED_FORMS: Mapping[str, ClosedForm] = {
    "star": star,
    "ring": ring,
    "shuffle": ring,  # in each of its groups
    "double_tree": double_tree,
    "halving_doubling": halving_doubling,
    "hierarchical": hierarchical,
    "gossip": gossip,
    "all_to_all": all_to_all,
    "all_gather": all_gather,
    "reduce": chain,
    "broadcast": chain,
}


def form_of(
    name: str, arguments: Mapping[str, Value], group: Group, turn: int | None = None
) -> tuple[ClosedForm | None, int]:
    """The closed form of a schedule of this name, built with these arguments, and the number of its
    chunks that travel side by side. A `turn` of a period selects the form of that turn; otherwise
    it is the mean over the period."""
    match name:
        case "ps":
            servers = _integer(arguments["servers"], group.size)
            return lambda x: ps(replace(x, P=servers)), servers
        case "native":
            crossing = leaving(group, sorted(group.ranks))
            return lambda x: ring(x, leaving=crossing), 1
        case "tree":
            return lambda x: tree(x, _integer(arguments["fanout"], 2)), 1
        case "double_tree":
            return double_tree, 2
        case "hierarchical" if arguments.get("form") == "leader":
            return hierarchical_by_leaders, len(group.racks)
        case "hierarchical":
            parts = {i / len(rack) for rack in group.racks for i in range(len(rack))}
            return hierarchical, len(group.racks) * len(parts)
        case "gossip" if arguments["graph"] == "exponential":
            if turn is None:
                return _all_distances, 1
            distance = 1 << turn % max(1, (group.size - 1).bit_length())
            return lambda x: gossip_exponential(x, distance), 1
    return CLOSED_FORMS.get(name), 1


def leaving(group: Group, order: Sequence[int]) -> int:
    """The largest number of members of a rack whose successor in the ring is in another rack."""
    rack_of = {rank: number for number, rack in enumerate(group.racks) for rank in rack}
    pairs = zip(order, (*order[1:], order[0]), strict=True)
    crossing = Counter(rack_of[a] for a, b in pairs if rack_of[a] != rack_of[b])
    return max(crossing.values(), default=0)


def _integer(value: Value, default: int) -> int:
    return value if isinstance(value, int) else default

"""Bytes per rank and per uplink, and sequential moves, are the literature's.

S is the data, N the ranks, C the racks, G the ranks of a rack. Sizes are multiples of all that
divides them, so that formulas hold to the byte.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor, log2

import pytest

from tests.running import mean_sets
from tests.schedules.test_topologies import VARIANTS, build
from thalweg.facts import Cluster, Link, parse_cluster
from thalweg.schedules import Group, Traffic, order, timeline, traffic
from thalweg.schedules.topologies import shuffle
from thalweg.schedules.topologies.ring import ring
from thalweg.schedules.trees import binary, complement, heap, over

ITEM = 4


def measured(
    variant: str, cluster: Cluster, elements: int, step: int = 0
) -> tuple[dict[int, Fraction], dict[int, Fraction], Traffic, int]:
    """Sent and received by each rank as multiples of S, all traffic, and sequential moves."""
    schedule = build(variant, Group.everybody(cluster), elements, ITEM, step)
    found = traffic(schedule, cluster)
    data = elements * ITEM
    sent = {rank: Fraction(n, data) for rank, n in found.sent.items()}
    received = {rank: Fraction(n, data) for rank, n in found.received.items()}
    return sent, received, found, timeline(schedule).sequential_moves


def uplinks(found: Traffic, elements: int) -> set[Fraction]:
    """Multiples of S on all uplinks, both directions."""
    return {
        Fraction(n, elements * ITEM) for link, n in found.links.items() if link.kind == "uplink"
    }


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 8, 16, 33])
@pytest.mark.parametrize("variant", ["ring", "native"])
def test_ring(variant: str, workers: int) -> None:
    """2(N-1)/N S sent and received by everybody in 2(N-1) moves (Patarasuk and Yuan)."""
    sent, received, _, moves = measured(variant, Cluster.flat(workers), 2 * workers * 100)
    expected = Fraction(2 * (workers - 1), workers)
    assert set(sent.values()) == set(received.values()) == {expected}
    assert moves == 2 * (workers - 1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rack_sizes", [[1], [2], [7], [16], [3, 3, 3], [5, 3, 4], [2] * 6])
def test_a_chunk_alone_takes_as_many_beats_as_it_has_sequential_moves(
    variant: str, rack_sizes: list[int]
) -> None:
    schedule = build(variant, Group.everybody(Cluster.regular(rack_sizes)), 1)
    drawn = timeline(schedule)
    assert drawn.sequential_moves == len(drawn.slots)


@pytest.mark.parametrize("interleaved", [False, True])
def test_ring_crosses_each_uplink_once_whatever_the_rank_numbers(interleaved: bool) -> None:
    cluster = Cluster.regular([4, 4, 4], interleaved=interleaved)
    _, _, found, _ = measured("ring", cluster, 2400)
    assert uplinks(found, 2400) == {Fraction(2 * 11, 12)}


def test_native_crosses_the_uplink_on_every_hop_when_ranks_are_interleaved() -> None:
    """G times what a ring that follows the racks carries."""
    _, _, found, _ = measured("native", Cluster.regular([4, 4], interleaved=True), 1600)
    assert uplinks(found, 1600) == {4 * Fraction(2 * 7, 8)}


@pytest.mark.parametrize("workers", [2, 3, 8, 33])
def test_star(workers: int) -> None:
    """The master's NIC carries (N-1) S each way, in 2(N-1) moves."""
    sent, received, _, moves = measured("star", Cluster.flat(workers), 1000)
    assert sent[0] == received[0] == workers - 1
    assert all(sent[rank] == received[rank] == 1 for rank in range(1, workers))
    assert moves == 2 * (workers - 1)


def out_of_racks(found: Traffic, elements: int) -> dict[str, Fraction]:
    return {
        link.owner: Fraction(n, elements * ITEM)
        for link, n in found.links.items()
        if (link.kind, link.direction) == ("uplink", "out")
    }


@pytest.mark.parametrize(("racks", "members"), [(2, 4), (3, 2), (4, 3)])
def test_star_through_uplinks(racks: int, members: int) -> None:
    """G S out of a rack, (N-G) S out of the master's."""
    _, _, found, _ = measured("star", Cluster.regular([members] * racks), 600)
    out = out_of_racks(found, 600)
    assert out.pop("rack0") == (racks - 1) * members
    assert set(out.values()) == {members}


@pytest.mark.parametrize(("racks", "members"), [(1, 6), (2, 4), (4, 4), (3, 5)])
def test_ps_on_all_ranks(racks: int, members: int) -> None:
    """2(N-1)/N S per NIC, and 2 G S (C-1)/C per uplink: G times a hierarchy's."""
    workers = racks * members
    elements = workers * 210
    sent, _, found, moves = measured("ps", Cluster.regular([members] * racks), elements)
    assert set(sent.values()) == {Fraction(2 * (workers - 1), workers)}
    assert moves == 2 * (workers - 1)
    expected = {Fraction(2 * members * (racks - 1), racks)} if racks > 1 else set()
    assert uplinks(found, elements) == expected


def test_ps_with_some_servers() -> None:
    """Each of P servers carries (N-1) S / P each way besides its own traffic."""
    sent, _, _, _ = measured("ps(servers=half)", Cluster.flat(8), 840)
    server = Fraction(7, 4) + Fraction(3, 4)  # answers to 7 ranks, and its parts for 3 others
    assert sorted(set(sent.values())) == [1, server]


@pytest.mark.parametrize("fanout", [1, 4])
def test_tree(fanout: int) -> None:
    """2(N-1) S in all, at most 1 + k times S sent by anyone."""
    sent, _, _, _ = measured(f"tree(fanout={fanout})", Cluster.flat(21), 1000)
    assert sum(sent.values()) == 2 * 20
    assert max(sent.values()) <= 1 + fanout


def test_tree_enters_each_rack_once() -> None:
    """A leaf rack's uplink carries S up and S down; an inner one's a result for each child too."""
    _, _, found, _ = measured("tree", Cluster.regular([4, 4, 4], interleaved=True), 1000)
    out = {
        link.owner: n
        for link, n in found.links.items()
        if link.direction == "out" and link.kind == "uplink"
    }
    assert out == {"rack0": 2 * 4000, "rack1": 4000, "rack2": 4000}


LAYOUTS = [(1, 2), (1, 9), (1, 31), (2, 4), (3, 3), (4, 4), (7, 7), (3, 12), (12, 3)]


@pytest.mark.parametrize(("racks", "members"), LAYOUTS)
@pytest.mark.parametrize("fanout", [1, 4])
def test_tree_over_racks(racks: int, members: int, fanout: int) -> None:
    """At most (1 + k) S sent, (1 + 2k) S by a rack's root; 2k moves for each level."""
    cluster = Cluster.regular([members] * racks)
    sent, _, found, moves = measured(f"tree(fanout={fanout})", cluster, 1000)
    roots = {rack.ranks[0] for rack in cluster.racks}
    assert all(n <= 1 + (2 if rank in roots else 1) * fanout for rank, n in sent.items())
    assert set(out_of_racks(found, 1000).values()) <= set(range(1, 2 + fanout))
    shape = heap(fanout)
    levels = sum(over(tuple(range(n)), shape).depth for n in (racks, members))
    assert moves <= 2 * fanout * levels


@pytest.mark.parametrize(("racks", "members"), LAYOUTS)
def test_double_tree_over_racks(racks: int, members: int) -> None:
    """At most 4 moves for each level; S/2 up an uplink and S/2 for each rack below, per tree."""
    _, _, found, moves = measured("double_tree", Cluster.regular([members] * racks), 2000)
    levels = sum(
        max(over(tuple(range(n)), shape).depth for shape in (binary, complement))
        for n in (racks, members)
    )
    assert moves <= 4 * levels
    halves = {n * 2 for n in out_of_racks(found, 2000).values()}
    assert all(n.denominator == 1 for n in halves)
    assert sum(out_of_racks(found, 2000).values()) == 2 * (racks - 1)


@pytest.mark.parametrize("workers", range(2, 34))
def test_double_tree(workers: int) -> None:
    """2(N-1) S in all; at most 2 S by a rank (3 S by the one that is inner twice, for odd N)."""
    sent, received, _, _ = measured("double_tree", Cluster.flat(workers), 2000)
    assert sum(sent.values()) == 2 * (workers - 1)
    heavy = [rank for rank in sent if max(sent[rank], received[rank]) > 2]
    assert len(heavy) <= workers % 2
    assert max(sent.values()) <= 3


@pytest.mark.parametrize("workers", range(2, 301))
def test_double_tree_shapes(workers: int) -> None:
    """Two trees of depth at most ceil(log2 N); nobody is inner in both, one rank if N is odd."""
    ranks = tuple(range(workers))
    trees = [over(ranks, binary), over(ranks, complement)]
    inner = [{rank for rank in ranks if tree.children[rank]} for tree in trees]
    for tree in trees:
        assert sorted((tree.root, *tree.parent)) == list(ranks)
        assert tree.depth <= ceil(log2(workers))
        assert max(len(children) for children in tree.children.values()) <= 2
    assert len(inner[0] & inner[1]) == workers % 2


@pytest.mark.parametrize("workers", [2, 4, 8, 16, 32, 64])
def test_halving_doubling_of_a_power_of_two(workers: int) -> None:
    """2(N-1)/N S in 2 log2 N moves (Rabenseifner)."""
    sent, received, _, moves = measured("halving_doubling", Cluster.flat(workers), workers * 10)
    assert set(sent.values()) == set(received.values()) == {Fraction(2 * (workers - 1), workers)}
    assert moves == 2 * int(log2(workers))


@pytest.mark.parametrize("workers", [3, 5, 6, 7, 11, 12, 20, 33, 63])
def test_halving_doubling_of_other_numbers(workers: int) -> None:
    """As in MPICH: p' = 2^floor(log2 N) take part, and N - p' have a guest who gives them S and
    gets S back, in 2 floor(log2 N) + 2 moves."""
    power = 2 ** floor(log2(workers))
    sent, received, _, moves = measured("halving_doubling", Cluster.flat(workers), power * 10)
    core = Fraction(2 * (power - 1), power)
    guests = workers - power
    by_bytes = sorted(sent.values())
    assert sorted(received.values()) == by_bytes
    expected = [Fraction(1)] * guests + [core] * (power - guests) + [core + 1] * guests
    assert by_bytes == sorted(expected)
    assert moves == 2 * floor(log2(workers)) + 2


@pytest.mark.parametrize(("racks", "members"), [(2, 4), (4, 2), (4, 4), (8, 2), (2, 16)])
def test_halving_doubling_keeps_most_bytes_in_the_rack(racks: int, members: int) -> None:
    """2(C-1)/C S per uplink if both are powers of two."""
    cluster = Cluster.regular([members] * racks, interleaved=True)
    _, _, found, _ = measured("halving_doubling", cluster, 1600)
    assert uplinks(found, 1600) == {Fraction(2 * (racks - 1), racks)}


@pytest.mark.parametrize("form", ["hierarchical", "hierarchical(form=leader)"])
@pytest.mark.parametrize(("racks", "members"), [(2, 4), (4, 4), (3, 5), (7, 12)])
def test_hierarchical(form: str, racks: int, members: int) -> None:
    """2(C-1)/C S per uplink in both forms, in 2(G + C - 2) moves."""
    cluster = Cluster.regular([members] * racks, nic="25gbit", interleaved=True)
    elements = racks * members * 10
    sent, _, found, moves = measured(form, cluster, elements)
    between = Fraction(2 * (racks - 1), racks)
    assert uplinks(found, elements) == {between}
    assert moves == 2 * (members + racks - 2)
    if form == "hierarchical":
        inside = Fraction(2 * (members - 1), members)
        assert set(sent.values()) == {inside + between / members}
    else:
        leader, chain, end = between + 1, Fraction(2), Fraction(1)
        assert set(sent.values()) <= {leader, chain, end}
        assert {sent[rack.ranks[0]] for rack in cluster.racks} == {leader}


@pytest.mark.parametrize("rack_sizes", [[5, 3, 4], [1, 7], [2, 2, 3], [6, 4]])
def test_hierarchical_with_uneven_racks(rack_sizes: list[int]) -> None:
    """The same on the uplinks; in a rack of G everybody sends 2(G-1)/G S and its share between."""
    racks, elements = len(rack_sizes), 420 * len(rack_sizes)
    cluster = Cluster.regular(rack_sizes, nic="25gbit")
    sent, _, found, _ = measured("hierarchical", cluster, elements)
    between = Fraction(2 * (racks - 1), racks)
    assert uplinks(found, elements) == {between}
    for rank, multiple in sent.items():
        members = len(cluster.rack(rank).ranks)
        assert multiple == Fraction(2 * (members - 1), members) + between / members


@pytest.mark.parametrize("workers", [2, 3, 8, 33])
def test_gossip(workers: int) -> None:
    """Both neighbours: 2 S (one if there is only one); one peer by turns: S."""
    sent, received, _, moves = measured("gossip", Cluster.flat(workers), 100)
    assert set(sent.values()) == set(received.values()) == {min(2, workers - 1)}
    assert moves == min(2, workers - 1)
    for step in range(7):
        sent, _, _, moves = measured("gossip(graph=exponential)", Cluster.flat(workers), 100, step)
        assert set(sent.values()) == {1}
        assert moves == 1


def test_gossip_through_uplinks() -> None:
    """A ring crosses it once each way; a peer at a distance may be in another rack for all G."""
    cluster = Cluster.regular([4] * 4, interleaved=True)
    _, _, found, _ = measured("gossip", cluster, 100)
    assert uplinks(found, 100) == {2}
    for step, flows in enumerate([1, 2, 4, 4]):
        _, _, found, _ = measured("gossip(graph=exponential)", cluster, 100, step)
        assert uplinks(found, 100) == {flows}


@pytest.mark.parametrize(("racks", "members"), [(2, 4), (4, 3), (3, 5)])
def test_shuffle_through_uplinks(racks: int, members: int) -> None:
    """A ring of one representative of each rack: 2(C-1)/C S."""
    cluster = Cluster.regular([members] * racks, interleaved=True)
    for step in range(members):
        for averaging_group in shuffle.groups(Group.everybody(cluster), step):
            group = averaging_group.group
            found = traffic(ring(group, 120 * racks * members, ITEM, step), cluster)
            if len(group.racks) > 1:
                expected = {Fraction(2 * (racks - 1), racks)}
                assert uplinks(found, 120 * racks * members) == expected
            else:
                assert uplinks(found, 120 * racks * members) == set()


@pytest.mark.parametrize(("racks", "busy"), [(4, 4), (5, 4)])
def test_shuffle_in_pairs_through_uplinks(racks: int, busy: int) -> None:
    """S through the uplink of every rack, but of one if their number is odd."""
    cluster = Cluster.regular([4] * racks, nic="1gbit", uplink="1gbit", interleaved=True)
    for step in range(4 * racks):
        meetings = [m.group for m in shuffle.groups(Group.everybody(cluster), step)]
        between = [group for group in meetings if len(group.racks) > 1]
        assert sum(len(group.racks) for group in between) == busy
        for group in between:
            assert uplinks(traffic(ring(group, 120, ITEM, step), cluster), 120) == {1}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_exponential_gossip_reaches_the_mean_in_log2_steps(stages: int) -> None:
    workers = 1 << stages
    group = Group.everybody(Cluster.flat(workers))
    held = {rank: Fraction(rank) for rank in range(workers)}
    for step in range(stages):
        schedule = build("gossip(graph=exponential)", group, 1, step=step)
        sets = {rank: mean_sets(schedule, rank) for rank in group.ranks}
        held = {rank: sum(held[o] for o in of) / len(of) for rank, of in sets.items()}
    assert set(held.values()) == {Fraction(workers - 1, 2)}


def test_no_slab_of_a_hierarchy_waits_for_another() -> None:
    """So the racks, the uplinks and the racks again work at the same time."""
    cluster = Cluster.regular([4, 4], nic="200mbit", uplink="50mbit")
    for form in ("hierarchical", "hierarchical(form=leader)"):
        schedule = build(form, Group.everybody(cluster), 2_500_000)
        slabs = len(schedule.sizes) // (8 if form == "hierarchical" else 2)
        assert slabs > 10
        for rank in schedule.ranks:
            ready = sum(waits == 0 for waits in order(schedule.moves(rank)).waits)
            assert ready >= slabs


def test_two_ranks_of_one_host_use_no_link() -> None:
    text = '[[rack]]\nname = "a"\nhosts = [{ name = "x", ranks = [0, 1] }]\n'
    _, _, found, _ = measured("ring", parse_cluster(text), 100)
    assert found.links == {}
    assert found.sent == {0: 400, 1: 400}


def test_traffic_names_links_by_their_owner() -> None:
    _, _, found, _ = measured("ring", Cluster.regular([1, 1]), 100)
    assert found.links == {
        Link(kind, owner, way): 400
        for kind, owners in (("nic", ("host0", "host1")), ("uplink", ("rack0", "rack1")))
        for owner in owners
        for way in ("out", "in")
    }

"""The forms against the schedules: bytes on the busiest NIC and uplink, and sequential moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log2, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.predict import as_printed, derived_forms
from tests.schedules.test_topologies import build
from thalweg.facts import Cluster, Duration
from thalweg.schedules import ContendedLinks, Group, Schedule, Traffic, timeline, traffic
from thalweg.schedules.closed_form import Cost, Symbols, is_even
from thalweg.schedules.topologies import shuffle
from thalweg.schedules.topologies.double_tree import double_tree_cost
from thalweg.schedules.topologies.gossip import distance_cost, gossip_cost
from thalweg.schedules.topologies.halving_doubling import halving_doubling_cost
from thalweg.schedules.topologies.hierarchical import hierarchical_cost, leaders_cost
from thalweg.schedules.topologies.ps import ps_cost
from thalweg.schedules.topologies.ring import ring_cost
from thalweg.schedules.topologies.star import star_cost
from thalweg.schedules.topologies.stragglar import stragglar_cost
from thalweg.schedules.topologies.tree import tree_cost

ITEM = 4
FORMS: dict[str, Callable[[Symbols], Cost]] = {
    "ring": ring_cost,
    "native": ring_cost,
    "star": star_cost,
    "ps": ps_cost,
    "ps(servers=1)": lambda x: ps_cost(x, 1),
    "ps(servers=half)": lambda x: ps_cost(x, (x.N + 1) // 2),
    "tree": lambda x: tree_cost(x, 2),
    "tree(fanout=1)": lambda x: tree_cost(x, 1),
    "tree(fanout=4)": lambda x: tree_cost(x, 4),
    "double_tree": double_tree_cost,
    "hierarchical": hierarchical_cost,
    "hierarchical(form=leader)": leaders_cost,
    "gossip": gossip_cost,
    "stragglar": stragglar_cost,
}
TREES = {"tree": 2, "tree(fanout=1)": 1, "tree(fanout=4)": 4, "double_tree": 2}
SHAPES = [(1, 1), (1, 2), (1, 7), (2, 1), (2, 2), (2, 4), (3, 3), (4, 4), (5, 1), (4, 2), (3, 5)]


def even(racks: int, members: int) -> Group:
    cluster = Cluster.regular(
        [members] * racks, nic="100mbit", uplink="100mbit", latency=Duration.parse("1ms")
    )
    return Group.everybody(cluster)


def schedule_of(variant: str, group: Group, step: int = 0) -> tuple[Schedule, Symbols]:
    elements = 27_720 * group.size
    schedule = build(variant, group, elements, ITEM, step)
    return schedule, Symbols.of(group, elements * ITEM)


def busiest(found: Traffic, kind: str) -> int:
    """The bytes on the busiest direction of a NIC or an uplink."""
    return max((n for link, n in found.links.items() if link.kind == kind), default=0)


def assert_same_bytes(form: Cost, schedule: Schedule, group: Group) -> None:
    found = traffic(schedule, group.cluster)
    near = {"rel": 1e-3, "abs": 1}  # what doesn't divide by the number of chunks
    assert form.nic == pytest.approx(busiest(found, "nic"), **near)
    assert form.uplink == pytest.approx(busiest(found, "uplink"), **near)


@pytest.mark.parametrize("variant", FORMS)
@examples(30)
@given(racks=st.integers(1, 9), members=st.integers(1, 9))
def test_bytes_on_the_busiest_links(variant: str, racks: int, members: int) -> None:
    group = even(racks, members)
    schedule, x = schedule_of(variant, group)
    assert_same_bytes(FORMS[variant](x), schedule, group)


@pytest.mark.parametrize("variant", FORMS)
@pytest.mark.parametrize(("racks", "members"), SHAPES)
def test_sequential_moves(variant: str, racks: int, members: int) -> None:
    """A tree's form counts hops, at each of which a parent takes in several children's messages."""
    schedule, x = schedule_of(variant, even(racks, members))
    real, said = timeline(schedule).sequential_moves, FORMS[variant](x).moves
    assert said <= real <= said * 2 * TREES[variant] if variant in TREES else said == real


@pytest.mark.parametrize("racks", [1, 2, 4, 8])
@pytest.mark.parametrize("members", [1, 2, 4, 8])
def test_halving_doubling_of_powers_of_two(racks: int, members: int) -> None:
    group = even(racks, members)
    schedule, x = schedule_of("halving_doubling", group)
    form = halving_doubling_cost(x)
    assert_same_bytes(form, schedule, group)
    assert form.moves == timeline(schedule).sequential_moves == 2 * log2(group.size)
    serial = hierarchical_cost(replace(x, alpha=0.0))  # in one chunk
    assert form.transfer == pytest.approx(serial.transfer)


@pytest.mark.parametrize("workers", range(2, 40))
def test_halving_doubling_in_one_rack(workers: int) -> None:
    group = even(1, workers)
    schedule, x = schedule_of("halving_doubling", group)
    form = halving_doubling_cost(x)
    assert_same_bytes(form, schedule, group)
    assert form.moves == timeline(schedule).sequential_moves


@examples(30)
@given(racks=st.integers(1, 9), members=st.integers(1, 9), turn=st.integers(0, 6))
def test_exponential_gossip(racks: int, members: int, turn: int) -> None:
    group = even(racks, members)
    turns = (group.size - 1).bit_length()
    if turns:
        schedule, x = schedule_of("gossip(graph=exponential)", group, turn)
        form = distance_cost(x, 1 << turn % turns)
        assert_same_bytes(form, schedule, group)


@examples(30)
@given(racks=st.integers(2, 9), members=st.integers(1, 9))
def test_a_ring_that_goes_round_the_racks_leaves_each_at_every_hop(
    racks: int, members: int
) -> None:
    cluster = Cluster.regular([members] * racks, nic="100mbit", uplink="100mbit", interleaved=True)
    group = Group.everybody(cluster)
    schedule, x = schedule_of("native", group)
    assert_same_bytes(ring_cost(x, leaving=members), schedule, group)


@pytest.mark.parametrize(("racks", "members"), [(4, 4), (2, 3), (3, 6), (5, 6)])
def test_ds_sync_is_the_longer_of_two_rings(racks: int, members: int) -> None:
    group = even(racks, members)
    x = Symbols.of(group, 1e6 * group.size)

    def turn(kept: ContendedLinks) -> float:
        averaging_groups = shuffle.groups(replace(group, contention=kept), 0)
        return max(ring_cost(Symbols.of(m.group, x.S)).seconds for m in averaging_groups)

    assert derived_forms.ds_sync(x).seconds == turn(ContendedLinks())
    pair = derived_forms.ds_sync(x, together=2)
    assert pair.seconds <= derived_forms.ds_sync(x).seconds
    whole = ring_cost(replace(x, N=members, C=1))  # of an odd number of racks one stays at home
    longest = max(pair, whole, key=lambda form: form.seconds) if racks % 2 else pair
    assert turn(ContendedLinks(pairs=True)) == longest.seconds
    assert derived_forms.ds_sync(x).uplink in (0, pytest.approx(hierarchical_cost(x).uplink))


def test_where_the_table_counts_half_duplex() -> None:
    """On an even cluster with thin uplinks and no latency the table has twice what a pair takes,
    twice what gossip does, and the ring and a hierarchy in one chunk as they are."""
    x = Symbols(N=16, C=4, G=4, S=1.0, beta1=1.0, beta2=10.0)
    assert as_printed.ring(x).transfer == ring_cost(x).transfer
    assert as_printed.hierarchical(x).transfer == hierarchical_cost(x).transfer
    assert as_printed.gossip(x).transfer == 2 * gossip_cost(x).transfer
    assert as_printed.ds_sync(x).transfer == 2 * derived_forms.ds_sync(x, together=2).transfer
    flat = replace(x, C=1, G=16, k=8)  # the table has one chunk too many
    one_chunk = 2 * flat.S * flat.beta1 / flat.k
    assert as_printed.double_tree(flat).transfer == pytest.approx(
        double_tree_cost(flat).transfer + one_chunk
    )


@pytest.mark.parametrize("servers", [1, 2, 4, 8, 16])
def test_shards_spare_an_uplink_only_up_to_one_server_a_rack(servers: int) -> None:
    x = Symbols(N=16, C=4, G=4, S=1.0, beta1=0.0, beta2=1.0)
    uplink = ps_cost(x, servers).uplink
    if servers <= x.C:
        assert 1 <= uplink / (as_printed.ps(x, servers).transfer / 2) <= 2
    else:
        assert uplink == 2 * x.G * (x.C - 1) / x.C > as_printed.ps(x, servers).transfer


@pytest.mark.parametrize("form", [star_cost, hierarchical_cost, double_tree_cost])
def test_the_best_number_of_chunks(form: Callable[[Symbols], Cost]) -> None:
    x = Symbols(N=16, C=4, G=4, S=4e6, alpha=1e-3, beta1=8e-8, beta2=8e-8)
    best = derived_forms.best_chunks(form, x)
    at = [form(replace(x, k=k)).seconds for k in range(1, 400)]
    assert at.index(min(at)) + 1 == pytest.approx(best, abs=1)


def test_the_papers_tree_has_the_papers_optimum() -> None:
    x = Symbols(N=16, G=16, S=4e6, alpha=1e-3, beta1=8e-8)
    best = derived_forms.best_chunks(double_tree_cost, x)
    depth, wire = 4, x.S * x.beta1
    assert best == pytest.approx(sqrt((depth - 1) * wire / x.alpha), rel=0.05)


def test_local_sgd_shares_a_meeting_among_its_steps() -> None:
    x = Symbols(N=8, C=2, G=4, S=1.0, beta1=1.0, beta2=4.0)
    flat = derived_forms.per_step(ring_cost(x), every=8)
    assert flat == ring_cost(x).seconds / 8
    inside = ring_cost(replace(x, N=4, C=1))
    both = derived_forms.per_step(hierarchical_cost(x), every=8, inside=inside)
    assert both == (hierarchical_cost(x).seconds + 7 * 1.5) / 8


def test_messages_sent_separately_cost_latency_and_no_bytes() -> None:
    x = Symbols(N=8, C=2, G=4, S=1.0, alpha=1.0, beta1=1.0, beta2=4.0)
    for form in (ring_cost, hierarchical_cost, gossip_cost, double_tree_cost):
        one, ten = form(x), form(replace(x, L=10))
        assert (ten.latency, ten.transfer) == (10 * one.latency, one.transfer)


def test_what_is_even() -> None:
    assert is_even(even(3, 4))
    assert is_even(Group.everybody(Cluster.flat(5)))
    assert not is_even(Group.everybody(Cluster.regular([3, 4])))
    assert not is_even(Group.everybody(Cluster.regular([2, 2], uplink=["1gbit", "2gbit"])))
    assert not is_even(Group.everybody(Cluster.regular([2], nic=["1gbit", "2gbit"])))

"""What a topology learns of a cluster."""

from __future__ import annotations

import pytest

from tests.schedules.test_topologies import build
from thalweg.errors import ClusterError, LayoutError
from thalweg.facts import Cluster, Duration, parse_cluster
from thalweg.schedules import Group, order

MIXED = parse_cluster("""
latency = "1ms"
[[rack]]
name = "a"
nic = "100mbit"
latency = "2ms"
uplink = { out = "1gbit", in = "50mbit" }
hosts = [{ name = "a0", ranks = [4] }, { name = "a1", ranks = [0], nic = "10gbit" }]
[[rack]]
name = "b"
nic = "1gbit"
latency = "5ms"
hosts = [{ name = "b0", ranks = [2, 1] }]
[[rack]]
name = "c"
nic = { out = "40gbit", in = "10mbit" }
latency = "3ms"
hosts = [{ name = "c0", ranks = [3] }]
""")


def test_order_follows_racks_and_hosts() -> None:
    group = Group.everybody(MIXED)
    assert group.racks == ((4, 0), (2, 1), (3,))
    assert group.order == (4, 0, 2, 1, 3)
    assert group.racks_from(1) == ((1, 2), (4, 0), (3,))
    assert group.subgroup([1, 4]).racks == ((4,), (1,))


def test_the_best_connected_has_the_fastest_slower_direction() -> None:
    assert Group.everybody(MIXED).best_connected() == 0
    assert Group((3, 4), MIXED).best_connected() == 4


def test_a_master_sits_at_the_best_connected() -> None:
    for variant in ("star", "tree"):
        schedule = build(variant, Group.everybody(MIXED), 1000)
        kinds = [move.kind.name for move in schedule.moves(0)]
        assert kinds.index("ADD") < kinds.index("SEND")
        assert "COPY" not in kinds


def test_the_slowest_and_the_longest() -> None:
    everybody = Group.everybody(MIXED)
    assert everybody.slowest_bytes_per_second() == 10e6 / 8
    assert Group((0, 2), MIXED).slowest_bytes_per_second() == 50e6 / 8
    assert everybody.longest_seconds() == pytest.approx(0.001 + 0.005 + 0.003)
    assert Group((0, 3), MIXED).longest_seconds() == pytest.approx(0.001 + 0.002 + 0.003)
    assert Group((1, 2), MIXED).longest_seconds() == pytest.approx(0.001)


def test_servers_are_spread_over_the_racks() -> None:
    cluster = Cluster.regular([4, 4, 4])
    schedule = build("ps(servers=1)", Group.everybody(cluster), 100)
    assert schedule.divisor(0) == 12
    spread = Group.everybody(Cluster.regular([2, 2]))
    halves = build("ps(servers=half)", spread, 100)
    adding = {r for r in range(4) if any(m.kind.name == "ADD" for m in halves.moves(r))}
    assert adding == {0, 2}


def test_a_ring_cuts_its_parts_in_two_where_the_wire_is_the_bottleneck() -> None:
    group = Group.everybody(Cluster.regular([4], nic="1gbit"))  # 100us latency
    pieces = {elements: len(build("ring", group, elements).sizes) for elements in (4, 10**5, 10**7)}
    assert pieces[4] == 4
    assert pieces[10**5] == 8  # a part of 100 KB takes 0.8 ms
    assert pieces[10**7] == 8


def slabs(form: str, rack_sizes: list[int], latency: str) -> int:
    cluster = Cluster.regular(
        rack_sizes, nic="1gbit", uplink="100mbit", latency=Duration.parse(latency)
    )
    schedule = build(form, Group.everybody(cluster), 250_000)
    racks, members = len(rack_sizes), rack_sizes[0]
    return len(schedule.sizes) // (racks if "leader" in form else racks * members)


def test_hierarchies_are_cut_into_slabs_by_their_phases() -> None:
    """1 MB at 100mbit takes 80 ms: sqrt(2 * 80 / 0.3) slabs of three phases of three messages."""
    assert slabs("hierarchical", [4, 4], "100us") == 23
    assert slabs("hierarchical", [4, 4], "1ms") == 7
    assert slabs("hierarchical", [4], "100us") == 1  # a rack alone has nothing to overlap
    assert slabs("hierarchical(form=leader)", [4, 4], "100us") == 48  # sqrt(6 * 80 / 0.2)
    assert slabs("hierarchical(form=leader)", [4], "100us") == 21  # sqrt(6 * 8 / 0.1) at 1gbit


def test_sends_do_not_wait_for_sends() -> None:
    """A master's answers leave together, not one behind the other."""
    schedule = build("star", Group.everybody(Cluster.flat(5)), 1)
    waiting = order(schedule.moves(0))
    sends = [i for i, move in enumerate(waiting.moves) if move.kind.name == "SEND"]
    assert [waiting.waits[i] for i in sends] == [1] * 4
    assert waiting.frees[sends[0] - 1] == tuple(sends)


def test_what_changes_a_chunk_waits_for_its_sends() -> None:
    schedule = build("gossip", Group.everybody(Cluster.flat(5)), 1)
    waiting = order(schedule.moves(0))
    assert waiting.waits == (0, 0, 2, 1)


@pytest.mark.parametrize("ranks", [(), (0, 0), (0, 9)])
def test_groups_that_cannot_be(ranks: tuple[int, ...]) -> None:
    with pytest.raises((LayoutError, ClusterError)):
        Group(ranks, MIXED)


def test_divisors_make_means() -> None:
    group = Group.everybody(Cluster.flat(6))
    assert build("ring", group, 10).divisor(3) == 6
    assert build("gossip", group, 10).divisor(3) == 3
    assert build("gossip(graph=exponential)", group, 10).divisor(3) == 2

"""One synchronisation under a plan: the closed form where racks are even, the busiest link of the
real schedule where they aren't."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given

from tests.clusters import groups
from tests.examples import examples
from thalweg.catalog import parse_plan
from thalweg.facts import Cluster, Duration, Size, Workload
from thalweg.predict import synchronisation_seconds
from thalweg.schedules import Group, together, traffic
from thalweg.steps import compile_step

PLANS = [
    "umw",
    "ps",
    "ps(servers=2)",
    "ring",
    "stragglar",
    "ddp",
    "tree",
    "double_tree",
    "halving_doubling",
    "hierarchical",
    "hierarchical(form=leader)",
    "gossip",
    "gossip(graph=exponential)",
    "dssync",
    "local_sgd(every=4)",
    "local_sgd(every=4, levels=rack)",
]
MB4 = Workload.of_size(Size.parse("4MB"))


def seconds(text: str, group: Group, workload: Workload = MB4) -> float:
    found = synchronisation_seconds(parse_plan(text), group, workload)
    assert found is not None
    return found


def lab(racks: int, members: int, uplink: str = "100mbit", interleaved: bool = False) -> Group:
    """Links of 100 Mbit/s, over which 4 MB take 0.32 s, and messages that cost nothing."""
    return Group.everybody(
        Cluster.regular(
            [members] * racks,
            nic="100mbit",
            uplink=uplink,
            latency=Duration(1e-12),
            interleaved=interleaved,
        )
    )


def test_figures_that_are_easily_checked() -> None:
    """4 x 4 hosts, 0.32 s for the data. Under `dssync` representatives meet in pairs, S, while
    three stay in each rack, 4/3 S; with fast uplinks all four meet, 3/2 S."""
    assert seconds("ring", lab(4, 4)) == pytest.approx(0.32 * 30 / 16)
    assert seconds("ps", lab(4, 4)) == pytest.approx(0.32 * 2 * 4 * 3 / 4)
    assert seconds("gossip", lab(4, 4)) == pytest.approx(0.32 * 2)
    assert seconds("dssync", lab(4, 4)) == pytest.approx(0.32 * 2 * 2 / 3)
    assert seconds("dssync", lab(4, 4, uplink="200mbit")) == pytest.approx(0.32 * 2 * 3 / 4)
    assert seconds("dssync", lab(2, 8)) == pytest.approx(0.32 * 2 * 6 / 7)
    assert seconds("halving_doubling", lab(4, 4)) == pytest.approx(0.32 * (1.5 + 1.5))
    assert seconds("gossip(graph=exponential)", lab(4, 4)) == pytest.approx(
        0.32 * mean([1, 2, 4, 4])
    )
    assert seconds("local_sgd(every=4)", lab(4, 4)) == seconds("ring", lab(4, 4))


def test_torchs_ring_depends_on_the_rank_numbers_and_ours_does_not() -> None:
    assert seconds("ddp", lab(4, 4)) == pytest.approx(seconds("ring", lab(4, 4)))
    assert seconds("ddp", lab(4, 4, interleaved=True)) == pytest.approx(
        4 * seconds("ring", lab(4, 4, interleaved=True))
    )


def test_a_bucket_each_pays_its_latency() -> None:
    cluster = Cluster.regular([4], nic="100mbit", latency=Duration.parse("1ms"))
    group, workload = Group.everybody(cluster), Workload.of_size(Size.parse("16MiB"))
    one = seconds("ring @ bucket=16MiB", group, workload)
    four = seconds("ring @ bucket=4MiB", group, workload)
    assert four - one == pytest.approx(3 * 2 * 3 * 1e-3)


def test_racks_of_two_meet_in_pairs() -> None:
    """All 3 between racks would take 4/3 of what a pair does."""
    assert seconds("dssync", lab(3, 2)) == pytest.approx(0.32)


@pytest.mark.parametrize("plan", PLANS)
def test_one_slow_uplink_counts_where_it_is_used(plan: str) -> None:
    """Uneven racks: never less than the busiest link needs; a NIC that is idle costs nothing."""
    even, slow = (
        Group.everybody(Cluster.regular([3, 5, 4], nic="1gbit", uplink=["1gbit", rate, "1gbit"]))
        for rate in ("1gbit", "10mbit")
    )
    assert seconds(plan, slow) > 5 * seconds(plan, even)


@pytest.mark.parametrize("plan", PLANS)
@examples(25)
@given(group=groups(most=17))
def test_any_group_takes_at_least_what_its_busiest_link_needs(plan: str, group: Group) -> None:
    parsed, workload = parse_plan(plan), Workload.of_size(Size.parse("400KB"))
    if parsed.topology.arguments.get("servers") and group.size < 2:
        return
    found = synchronisation_seconds(parsed, group, workload)
    every, rates = parsed.cadence.every, group.cluster.rates()
    least = 0.0
    for _, at_once in compile_step(parsed, group, workload, every - 1).concurrent:
        links = together(traffic(r.schedule, group.cluster) for r in at_once).links
        least += max((rates[k].seconds(n) for k, n in links.items() if k in rates), default=0.0)
    one_turn = parsed.topology.name not in ("gossip", "shuffle")
    if one_turn and least:
        assert found is not None
        assert found >= least * 0.999
    assert found is None or found > 0


@pytest.mark.parametrize(
    "plan", ["gc(stragglers=1)", "codedreduce(fanout=2, stragglers=1)", "lgc", "asp"]
)
def test_no_closed_form(plan: str) -> None:
    assert synchronisation_seconds(parse_plan(plan), lab(3, 4), MB4) is None


def test_nothing_travels_alone() -> None:
    assert synchronisation_seconds(parse_plan("ring"), lab(1, 1), MB4) is None


def test_a_payload_that_can_be_added_takes_the_same_way() -> None:
    assert seconds("ring+fp16", lab(4, 4)) == pytest.approx(seconds("ring", lab(4, 4)) / 2)


def test_two_shots_of_bytes() -> None:
    """int8 on 4 x 4: a quarter of S, plus a scale here and there. Shards: a rack's four send
    12/16 S' each through the uplink, 3 S'; gathering: 15/16 S'. S' takes 0.08 s."""
    assert seconds("ring+int8", lab(4, 4)) == pytest.approx((3 + 15 / 16) * 0.08, rel=0.02)


def test_payloads_that_are_gathered_whole() -> None:
    """topk sends values and indices of one in a hundred, and everybody gets all sixteen."""
    tenth = seconds("ring+topk(ratio=0.1)", lab(4, 4))
    assert tenth == pytest.approx(15 * 0.1 * 0.64, rel=0.02)


def test_between_racks_alone() -> None:
    """Chains of four in the racks there and back, and a ring of four racks at half the size."""
    whole = seconds("hierarchical(compress=between)+fp16", lab(4, 4))
    assert whole > 2 * 0.32 + 2 * 3 / 4 * 0.16

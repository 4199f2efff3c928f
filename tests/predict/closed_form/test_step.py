"""Closed forms of whole steps: as the replay has it where both can be had, and quick where only
they can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thalweg.errors import PlanError
from thalweg.facts import Cluster, Costs, Duration, Situation, Size, StragglerDelay, Workload
from thalweg.predict import Symbols, predict
from thalweg.predict.straggler_recurrence import expected_latest
from thalweg.schedules import Group, all_gather, all_to_all, traffic
from thalweg.schedules.collectives import all_gather_cost, all_to_all_cost, chain_cost

LASTS = Costs(forward=Duration(0.02), backward=Duration(0.05), optimizer=Duration(0.01))
JOB = replace(Workload.of_size(Size.parse("20MB")), costs=LASTS)


@pytest.mark.parametrize(
    "plan",
    [
        "ddp",
        "ring",
        "double_tree",
        "hierarchical",
        "umw",
        "stragglar",
        "ring+fp16",
        "ring+int8",
        "ring+topk",
        "hierarchical+powersgd(rank=4)",
        "dssync",
        "gossip",
        "local_sgd(every=8)",
        "local_sgd(every=4, levels=rack)",
    ],
)
def test_as_replayed(plan: str) -> None:
    cluster = Cluster.regular([4, 4], nic="1gbit", uplink="2gbit")
    situation = Situation(cluster=cluster, workload=JOB)
    form = predict(plan, situation, by_form=True)
    assert form.form == "closed form"
    assert form.seconds == pytest.approx(predict(plan, situation).seconds, rel=0.25)


@pytest.mark.parametrize(("racks", "members"), [(1, 5), (2, 4), (4, 3), (3, 1)])
def test_bytes_of_what_compressors_exchange(racks: int, members: int) -> None:
    cluster = Cluster.regular([members] * racks, nic="1gbit", uplink="1gbit")
    group = Group.everybody(cluster)
    elements = 1000 * group.size
    x = Symbols.of(group, 4 * elements)
    for form, schedule in (
        (all_gather_cost(x), all_gather(group, elements, 4)),
        (all_to_all_cost(x), all_to_all(group, elements, 4)),
    ):
        links = traffic(schedule, cluster).links
        for kind, expected in (("nic", form.nic), ("uplink", form.uplink)):
            busiest = max((n for link, n in links.items() if link.kind == kind), default=0)
            assert busiest == pytest.approx(expected)


def test_a_chain_is_a_pipeline() -> None:
    """(N + k - 2)(alpha + S beta/k) of five members and four chunks."""
    x = Symbols(N=5, G=5, S=4e6, alpha=1e-3, beta1=1e-8, k=4)
    assert chain_cost(x).seconds == pytest.approx((5 + 4 - 2) * (1e-3 + 1e-2))


def test_a_ring_by_hand() -> None:
    """One bucket of 20 MB on a hundred links of 1 Gbit/s: 2 99/100 S beta after backward, and 198
    messages of 100 us."""
    cluster = Cluster.regular([100], nic="1gbit", latency=Duration(1e-4))
    found = predict("ring", Situation(cluster=cluster, workload=JOB), by_form=True)
    assert found.parts.compute == pytest.approx(0.08)
    assert found.parts.transfer == pytest.approx(2 * 0.99 * 0.16 + 198e-4, rel=0.001)


def test_a_hundred_thousand_workers() -> None:
    cluster = Cluster.regular([100] * 1000, nic="10gbit", uplink="40gbit")
    found = predict("hierarchical", Situation(cluster=cluster, workload=JOB))
    assert found.form == "closed form"
    assert 0.08 < found.seconds < predict("ring", Situation(cluster=cluster, workload=JOB)).seconds


@pytest.mark.parametrize("plan", ["gc(stragglers=1)", "codedreduce", "lgc", "asp"])
def test_who_waits_for_a_quorum_has_none(plan: str) -> None:
    with pytest.raises(PlanError, match="no closed form, and 1000 workers are too many"):
        predict(plan, Situation(cluster=Cluster.flat(1000), workload=JOB))


def test_the_latest_of_two() -> None:
    """1 s with probability 1/4; else 0.5 s with 1/2: 1/4 + 3/4 1/2 1/2."""
    late = [
        StragglerDelay(probability=0.5, delay=Duration(0.5)),
        StragglerDelay(probability=0.25, delay=Duration(1.0)),
    ]
    assert expected_latest(late) == pytest.approx(0.25 + 0.75 * 0.5 * 0.5)
    assert expected_latest([]) == 0

"""Closed forms of whole steps: as the replay has it where both can be had, and quick where only
they can."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

import pytest

from thalweg.errors import PlanError
from thalweg.facts import Cluster, Costs, Duration, Lateness, Size, Workload
from thalweg.predict import predict
from thalweg.predict.by_forms import expected_latest

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
    form = predict(plan, cluster, JOB, by_form=True)
    assert form.form == "closed form"
    assert form.seconds == pytest.approx(predict(plan, cluster, JOB).seconds, rel=0.25)


def test_a_ring_by_hand() -> None:
    """One bucket of 20 MB on a hundred links of 1 Gbit/s: 2 99/100 S beta after backward, and 198
    messages of 100 us."""
    cluster = Cluster.regular([100], nic="1gbit", latency=Duration(1e-4))
    found = predict("ring", cluster, JOB, by_form=True)
    assert found.parts.compute == pytest.approx(0.08)
    assert found.parts.transfer == pytest.approx(2 * 0.99 * 0.16 + 198e-4, rel=0.001)


def test_a_hundred_thousand_workers() -> None:
    cluster = Cluster.regular([100] * 1000, nic="10gbit", uplink="40gbit")
    since = monotonic()
    found = predict("hierarchical", cluster, JOB)
    assert found.form == "closed form"
    assert 0.08 < found.seconds < predict("ring", cluster, JOB).seconds
    assert monotonic() - since < 20


@pytest.mark.parametrize("plan", ["gc(stragglers=1)", "codedreduce", "lgc", "asp"])
def test_who_waits_for_a_quorum_has_none(plan: str) -> None:
    with pytest.raises(PlanError, match="no closed form, and 1000 workers are too many"):
        predict(plan, Cluster.flat(1000), JOB)


def test_the_latest_of_two() -> None:
    """1 s with probability 1/4; else 0.5 s with 1/2: 1/4 + 3/4 1/2 1/2."""
    late = [
        Lateness(probability=0.5, delay=Duration(0.5)),
        Lateness(probability=0.25, delay=Duration(1.0)),
    ]
    assert expected_latest(late) == pytest.approx(0.25 + 0.75 * 0.5 * 0.5)
    assert expected_latest([]) == 0

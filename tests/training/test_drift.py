"""Replicas drift as far apart as the table of meetings lets expect, and no further."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.conftest import InOneCrew
from tests.training.workers import TIMEOUT, on_ranks
from thalweg.catalog import default_catalog, parse_plan
from thalweg.facts import Cluster
from thalweg.predict.mixing import MixingSummary, mixing_of, mixing_summary
from thalweg.schedules import Group
from thalweg.training import attach

VALUES, LR = 2000, 0.1
EVEN = Cluster.regular([4, 4])
SLOW_RACK = Cluster.regular([4, 4], nic="100mbit", uplink=["40mbit", "100mbit"])
SLOW_HOST = Cluster.regular([4, 4], nic=["50mbit", *["100mbit"] * 7])


def expected(sync: str, cluster: Cluster) -> MixingSummary:
    return mixing_summary(mixing_of(parse_plan(sync), Group.everybody(cluster), default_catalog()))


@pytest.mark.parametrize(
    ("sync", "cluster"),
    [
        ("dssync(adjust=false)", EVEN),
        ("dssync(adjust=false)", SLOW_RACK),
        ("dssync(adjust=false)", SLOW_HOST),
        ("gossip", EVEN),
        ("local_sgd(every=4, levels=rack)", EVEN),
        ("local_sgd(every=1, levels=rack, delay=1)", EVEN),
    ],
)
def test_measured_drift_is_the_expected_one(
    sync: str, cluster: Cluster, in_one_crew: InOneCrew
) -> None:
    """Plain SGD on gradients that are noise of variance one, after three periods, over one more."""

    def work(rank: int, sync: str, cluster: Cluster) -> dict[str, Any]:
        steps = max(8, expected(sync, cluster).period)
        torch.manual_seed(0)
        model = nn.Linear(VALUES, 1, bias=False)
        sgd = torch.optim.SGD(model.parameters(), LR)
        run = attach(model, sgd, plan=sync, cluster=cluster, timeout=TIMEOUT)
        noise = torch.Generator().manual_seed(rank + 1)
        squares = []
        for number in range(3 * steps + steps):
            sgd.zero_grad()
            model(torch.randn(1, VALUES, generator=noise)).sum().backward()
            sgd.step()
            if number >= 3 * steps:
                squares.append(run.report(drift=True).drift ** 2)
        run.close()
        return {"drift": sqrt(sum(squares) / len(squares) / VALUES) / LR}

    results = in_one_crew(8, work)
    assert len({result["drift"] for result in results}) == 1  # all ranks measure the same
    assert results[0]["drift"] == pytest.approx(sqrt(expected(sync, cluster).drift), rel=0.1)


def test_plans_that_keep_replicas_equal_do_not_drift() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = nn.Linear(3, 1)
        run = attach(model, torch.optim.SGD(model.parameters(), LR), plan="ring", timeout=TIMEOUT)
        drift = run.report(drift=True).drift
        run.close()
        return {"drift": drift}

    assert [result["drift"] for result in on_ranks(2, work)] == [0.0, 0.0]


def test_the_mean_of_any_tensors() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = nn.Linear(3, 1)
        run = attach(model, torch.optim.SGD(model.parameters(), LR), plan="ring", timeout=TIMEOUT)
        values = torch.tensor([float(rank), 1.0])
        run.all_reduce_mean([values])
        run.close()
        return {"values": values.tolist()}

    assert [result["values"] for result in on_ranks(2, work)] == [[0.5, 1.0], [0.5, 1.0]]

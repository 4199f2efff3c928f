"""No replay is faster than the busiest link allows."""

from __future__ import annotations

import pytest

from thalweg.catalog import parse_plan
from thalweg.facts import Cluster, Size, Workload
from thalweg.predict.flow_simulator import simulate
from thalweg.schedules import Group, traffic
from thalweg.steps import compile_step

PLANS = ["ring", "ddp", "tree", "double_tree", "halving_doubling", "hierarchical", "umw", "ps"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("uplink", ["500mbit", "2gbit"])
@pytest.mark.parametrize("racks", [(4, 4), (3, 2, 2)])
def test_never_below_the_busiest_link(plan: str, uplink: str, racks: tuple[int, ...]) -> None:
    cluster = Cluster.regular(racks, nic="1gbit", uplink=uplink)
    rates, workload = cluster.rates(), Workload.of_size(Size.parse("20MB"))
    for round_ in compile_step(parse_plan(plan), Group.everybody(cluster), workload, 0).rounds:
        links = traffic(round_.schedule, cluster).links
        busiest = max(rates[link].seconds(nbytes) for link, nbytes in links.items())
        assert max(simulate(round_.schedule, cluster).values()) >= busiest

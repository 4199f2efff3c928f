"""What `bench collectives` predicts for its rows."""

from __future__ import annotations

import pytest

from thalweg.bench.collectives import GLOO, CollectiveCase, entries, predicted
from thalweg.facts import Cluster, Size, Workload
from thalweg.predict import Symbols
from thalweg.schedules import Group
from thalweg.schedules.topologies.ring import ring_cost

WORKLOAD = Workload.of_size(Size.parse("100MB"))  # four buckets


def cluster(interleaved: bool) -> Cluster:
    return Cluster.regular([4] * 4, nic="1gbit", uplink="1gbit", interleaved=interleaved)


@pytest.mark.parametrize(("interleaved", "leaving"), [(False, 1), (True, 4)])
def test_torchs_own_row_is_a_ring_of_all_bytes_at_once(interleaved: bool, leaving: int) -> None:
    """In the order of the rank numbers, wherever they are."""
    place = cluster(interleaved)
    form = ring_cost(Symbols.of(Group.everybody(place), WORKLOAD.nbytes), leaving=leaving)
    assert predicted(CollectiveCase(GLOO, GLOO), place, WORKLOAD) == pytest.approx(form.seconds)
    assert predicted(CollectiveCase("ddp", GLOO), place, WORKLOAD) == pytest.approx(form.seconds)


@pytest.mark.parametrize("sync", ["dssync", "gossip", "local_sgd(every=4)", "ring", "umw"])
def test_the_row_of_a_plan_is_predicted_and_not_without_rates(sync: str) -> None:
    [row] = [entry for entry in entries([sync]) if entry.sync == sync]
    assert predicted(row, cluster(False), WORKLOAD) is not None
    assert predicted(row, None, WORKLOAD) is None

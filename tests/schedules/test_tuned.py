"""Which all-reduce a bucket gets, by its size."""

from __future__ import annotations

from itertools import pairwise

import pytest

from thalweg.catalog import parse_plan
from thalweg.facts import Cluster, Duration, Size, Workload
from thalweg.predict.closed_form import synchronisation_seconds
from thalweg.schedules import Group
from thalweg.schedules.topologies.tuned import tuned

CHOICES = ("ring", "halving_doubling", "double_tree", "hierarchical")
SIZES = [4 * 4**power for power in range(1, 14)]  # bytes, to 268 MB


def group_of(racks: list[int], uplink: str | None = None, latency: float = 2e-4) -> Group:
    cluster = Cluster.regular(racks, nic="1gbit", uplink=uplink, latency=Duration(latency))
    return Group.everybody(cluster)


def test_hops_count_for_small_buckets_and_bytes_for_large_ones() -> None:
    group = group_of([6])
    assert tuned(group, 1000, 4, 0).name == "halving_doubling"
    assert tuned(group, 10_000_000, 4, 0).name == "ring"


def test_a_hierarchy_where_uplinks_are_thin() -> None:
    assert tuned(group_of([3, 3], "100mbit"), 10_000_000, 4, 0).name == "hierarchical"


def test_larger_buckets_never_go_back_to_fewer_hops() -> None:
    """Once a ring is quicker than exchanges of halves, it stays so."""
    for size in range(2, 20):
        names = [tuned(group_of([size]), nbytes // 4, 4, 0).name for nbytes in SIZES]
        turns = [(a, b) for a, b in pairwise(names) if a != b]
        assert len(turns) <= 2, (size, names)


@pytest.mark.parametrize("racks", [[2], [4], [6], [8], [12], [4, 4], [3, 3, 3], [8, 8, 8, 8]])
@pytest.mark.parametrize("uplink", [None, "1gbit", "200mbit"])
def test_nearly_as_quick_as_the_best_of_its_choices(racks: list[int], uplink: str | None) -> None:
    """By the closed forms, which know the pieces of a schedule and each of its links."""
    group = group_of(racks, uplink)
    for nbytes in SIZES[2:]:
        workload = Workload.of_size(Size(nbytes))
        settings = " @ bucket=1GB"
        seconds = {
            name: synchronisation_seconds(parse_plan(name + settings), group, workload)
            for name in ("tuned", *CHOICES)
        }
        best = min(seconds[name] or float("inf") for name in CHOICES)
        assert (seconds["tuned"] or 0.0) <= 1.3 * best, (nbytes, seconds)

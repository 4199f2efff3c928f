from __future__ import annotations

import itertools
import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.chaos.fault import (
    FAULT_KINDS,
    FAULTS_WITHOUT_VICTIM,
    LASTING_FAULTS,
    LINK_FAULTS,
    Fault,
    FaultKind,
    draw_faults,
    max_ranks_down,
)
from thalweg.errors import UsageError
from thalweg.facts import Cluster

CLUSTERS = st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda s: sum(s) > 1)
SEEDS = st.integers(0, 2**32)
SOME = st.lists(st.sampled_from(FAULT_KINDS), min_size=1, max_size=len(FAULT_KINDS), unique=True)


def cluster_of(sizes: list[int]) -> Cluster:
    return Cluster.regular(sizes, nic="200mbit")


@given(SEEDS, CLUSTERS, SOME)
def test_the_seed_alone_decides(seed: int, sizes: list[int], kinds: list[FaultKind]) -> None:
    cluster = cluster_of(sizes)
    assert draw_faults(seed, cluster, 20, kinds) == draw_faults(seed, cluster, 20, kinds)


@given(SEEDS, CLUSTERS, SOME)
def test_there_are_as_many_as_asked_for_and_of_these_kinds(
    seed: int, sizes: list[int], kinds: list[FaultKind]
) -> None:
    faults = draw_faults(seed, cluster_of(sizes), 30, kinds)
    assert [fault.number for fault in faults] == list(range(30))
    assert {fault.kind for fault in faults} <= set(kinds)


@given(SEEDS, CLUSTERS, SOME)
def test_no_more_is_out_at_once_than_a_run_can_bear(
    seed: int, sizes: list[int], kinds: list[FaultKind]
) -> None:
    cluster = cluster_of(sizes)
    faults = draw_faults(seed, cluster, 30, kinds)
    for before, fault in itertools.pairwise(faults):
        if fault.overlaps:
            assert not before.overlaps, "at most two at once"
            assert not before.hits(cluster) & fault.hits(cluster)
            assert len(before.hits(cluster) | fault.hits(cluster)) <= max_ranks_down(cluster)
    for fault in faults:
        if fault.kind != "blackhole":  # one end of it is enough to leave out
            assert len(fault.hits(cluster)) <= max_ranks_down(cluster)


@given(SEEDS, CLUSTERS, SOME)
def test_all_heals_and_what_hits_nobody_stands_alone(
    seed: int, sizes: list[int], kinds: list[FaultKind]
) -> None:
    faults = draw_faults(seed, cluster_of(sizes), 30, kinds)
    assert not faults[0].overlaps
    for before, fault in itertools.pairwise(faults):
        assert (fault.hold > 0) == (fault.kind in LASTING_FAULTS)
        if fault.kind in FAULTS_WITHOUT_VICTIM:
            assert fault.rank is None
            assert not fault.overlaps
        if before.kind in FAULTS_WITHOUT_VICTIM:
            assert not fault.overlaps


@given(SEEDS, CLUSTERS, SOME)
def test_how_long_they_last_may_be_said(
    seed: int, sizes: list[int], kinds: list[FaultKind]
) -> None:
    for fault in draw_faults(seed, cluster_of(sizes), 30, kinds, 10.0):
        assert fault.hold == (10.0 if fault.kind in LASTING_FAULTS else 0.0)
        assert not fault.overlaps


@given(SEEDS)
def test_all_kinds_come_in_the_long_run(seed: int) -> None:
    faults = draw_faults(seed, cluster_of([4, 4]), 400, FAULT_KINDS)
    assert {fault.kind for fault in faults} == set(FAULT_KINDS)
    assert any(fault.rack is not None for fault in faults)
    assert any(fault.overlaps for fault in faults)
    assert {f.direction for f in faults if f.kind == "oneway"} == {"in", "out"}


@given(SEEDS, CLUSTERS)
def test_faults_survive_json(seed: int, sizes: list[int]) -> None:
    for fault in draw_faults(seed, cluster_of(sizes), 10, FAULT_KINDS):
        assert Fault(**json.loads(json.dumps(asdict(fault)))) == fault


def test_links_that_are_hit_are_a_hosts_or_a_racks() -> None:
    cluster = cluster_of([2, 2])
    for fault in draw_faults(3, cluster, 100, LINK_FAULTS):
        assert (fault.rank is None) != (fault.rack is None)
        assert (fault.rate is not None) == (fault.kind == "degrade")
        assert (fault.peer is not None) == (fault.kind == "blackhole")


def test_one_worker_is_refused() -> None:
    with pytest.raises(UsageError, match="can't survive a fault"):
        draw_faults(1, Cluster.flat(1), 3, ("kill",))

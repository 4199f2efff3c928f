"""What holds for the mixing matrix of every step of every plan: the mean is kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clusters import groups as any_groups
from tests.examples import examples
from tests.predict.mixing.distances import drift, mean_moved
from tests.schedules.test_shuffle import contended
from thalweg.catalog import default_catalog
from thalweg.facts import Cluster
from thalweg.predict.mixing import Matrix, Mixing, mixing_of
from thalweg.schedules import Group
from thalweg.schedules.topologies import shuffle

CATALOG = default_catalog()
PLANS = [
    "dssync",
    "dssync+int8",
    "gossip",
    "gossip(graph=exponential)",
    "local_sgd(every=3)",
    "local_sgd(every=2, levels=rack)",
    "local_sgd(every=2, levels=rack, delay=1)",
]


def matrix(mixing: Mixing, step: int) -> Matrix:
    """W_t, whole."""
    return mixing.mixed(step, np.eye(mixing.size))


def matrices(mixing: Mixing, most: int = 60) -> list[Matrix]:
    return [matrix(mixing, step) for step in range(min(len(mixing.steps), most))]


@examples(40)
@given(group=contended())
def test_tables_of_meetings_are_projections(group: Group) -> None:
    if shuffle.choose_table(group).period > 1000:
        group = replace(group, contention=None)
    for matrix in matrices(mixing_of(CATALOG.plan("dssync"), group, CATALOG)):
        assert (matrix >= 0).all()
        assert np.allclose(matrix, matrix.T)
        assert np.allclose(matrix.sum(axis=0), 1)
        assert np.allclose(matrix @ matrix, matrix)


@examples(60)
@given(group=any_groups(most=9), plan=st.sampled_from(PLANS), seed=st.integers(0, 99))
def test_the_mean_is_kept_and_drift_never_grows(group: Group, plan: str, seed: int) -> None:
    mixing = mixing_of(CATALOG.plan(plan), group, CATALOG)
    assert mixing.is_connected
    replicas = np.random.default_rng(seed).normal(3, 1, (group.size, 5))
    for step, matrix in enumerate(matrices(mixing, 20)):
        assert np.allclose(matrix.sum(axis=0), 1)
        assert np.allclose(matrix.sum(axis=1), 1)
        after = mixing.mixed(step, replicas)
        assert np.allclose(after, matrix @ replicas)
        assert np.allclose(mixing.mixed_first(step, replicas.T), replicas.T @ matrix)
        assert mean_moved(list(replicas), list(after)) < 1e-12
        assert drift(list(after)).absolute <= drift(list(replicas)).absolute + 1e-12
        replicas = after


def test_members_of_some_ranks_only() -> None:
    cluster = Cluster.regular([4, 4])
    mixing = mixing_of(CATALOG.plan("dssync"), Group((7, 2, 5, 1), cluster), CATALOG)
    assert mixing.size == 4
    assert {place for step in mixing.steps for each in step for place in each.places} == {
        0,
        1,
        2,
        3,
    }
    assert np.allclose(matrix(mixing, 0).sum(axis=0), 1)


def test_gossip_weighs_neighbours_equally() -> None:
    group = Group.everybody(Cluster.flat(5))
    [ring] = matrices(mixing_of(CATALOG.plan("gossip"), group, CATALOG))
    assert np.allclose(ring[0], [1 / 3, 1 / 3, 0, 0, 1 / 3])
    one = mixing_of(CATALOG.plan("gossip(graph=exponential)"), group, CATALOG)
    assert one.period == 3
    assert np.allclose(matrix(one, 1)[0], [1 / 2, 0, 0, 1 / 2, 0])


def test_windows_keep_their_length() -> None:
    uplinks = ["250mbit", "1gbit", "1gbit"]
    group = Group.everybody(Cluster.regular([3] * 3, nic="1gbit", uplink=uplinks))
    mixing = mixing_of(CATALOG.plan("dssync"), group, CATALOG)
    assert {(each.lasts, each.delay) for step in mixing.steps for each in step} == {(1, 0), (4, 3)}


@pytest.mark.parametrize(
    ("replicas", "absolute", "relative"),
    [
        ([[1.0, 0.0], [-1.0, 0.0]], 1.0, float("inf")),
        ([[3.0, 4.0], [3.0, 4.0]], 0.0, 0.0),
        ([[0.0], [2.0], [4.0]], (8 / 3) ** 0.5, (8 / 3) ** 0.5 / 2),
        ([np.zeros((2, 3)), np.zeros((2, 3))], 0.0, 0.0),
    ],
)
def test_drift_of_given_replicas(
    replicas: list[list[float]], absolute: float, relative: float
) -> None:
    found = drift(replicas)
    assert found.absolute == pytest.approx(absolute)
    assert found.relative == pytest.approx(relative)


def test_a_mean_that_moves_is_noticed() -> None:
    assert mean_moved([[1.0], [3.0]], [[2.0], [2.0]]) == 0
    assert mean_moved([[1.0], [3.0]], [[2.0], [3.0]]) == pytest.approx(0.25)

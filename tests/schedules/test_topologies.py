"""Every topology, on any group: it passes its check, and gives the right sums for real."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clusters import groups
from tests.examples import examples
from tests.running import mean_sets, run, whole_numbers
from thalweg.catalog import default_catalog
from thalweg.declarations import fill_defaults
from thalweg.facts import Cluster
from thalweg.schedules import Group, Schedule, check

TOPOLOGIES = default_catalog().topologies
VARIANTS = {
    **{name: (name, {}) for name in TOPOLOGIES},
    "star(root=last)": ("star", {"root": "last"}),
    "ps(servers=1)": ("ps", {"servers": "1"}),
    "ps(servers=half)": ("ps", {"servers": "half"}),
    "tree(fanout=1)": ("tree", {"fanout": "1"}),
    "tree(fanout=4)": ("tree", {"fanout": "4"}),
    "hierarchical(form=leader)": ("hierarchical", {"form": "leader"}),
    "gossip(graph=exponential)": ("gossip", {"graph": "exponential"}),
}
WORDS = {
    "last": lambda group: str(group.ranks[-1]),
    "half": lambda group: str((group.size + 1) // 2),
}


def build(variant: str, group: Group, elements: int, itemsize: int = 4, step: int = 0) -> Schedule:
    name, words = VARIANTS[variant]
    written = [(key, WORDS[word](group) if word in WORDS else word) for key, word in words.items()]
    topology = TOPOLOGIES[name]
    arguments = fill_defaults(name, written, topology.parameters)
    return topology.build(group, elements, itemsize, step, **arguments)


def assert_right(schedule: Schedule) -> None:
    check(schedule)
    inputs = whole_numbers(schedule)
    for rank, result in run(schedule, inputs).items():
        if schedule.elements:
            expected = np.sum([inputs[other] for other in mean_sets(schedule, rank)], axis=0)
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("variant", VARIANTS)
@examples(100)
@given(
    group=groups(),
    elements=st.integers(0, 200) | st.integers(201, 50_000),
    step=st.integers(0, 7),
)
def test_any_group_any_size(variant: str, group: Group, elements: int, step: int) -> None:
    assert_right(build(variant, group, elements, step=step))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("workers", range(1, 34))
def test_every_number_of_workers(variant: str, workers: int) -> None:
    for elements in (workers - 1, workers, 1000):
        check(build(variant, Group.everybody(Cluster.flat(workers)), elements))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rack_sizes", [[50], [16, 16, 16, 16], [21, 2, 40, 1], [1] * 48])
def test_larger_ones(variant: str, rack_sizes: list[int]) -> None:
    cluster = Cluster.regular(rack_sizes, nic="1gbit", uplink="100mbit", interleaved=True)
    assert_right(build(variant, Group.everybody(cluster), 4096))


MIXING = [v for v, (name, _) in VARIANTS.items() if TOPOLOGIES[name].mixes]


@pytest.mark.parametrize("variant", MIXING)
@examples(40)
@given(group=groups(), step=st.integers(0, 9))
def test_mixing_keeps_the_mean(variant: str, group: Group, step: int) -> None:
    """The mixing matrix is doubly stochastic: each rank's weights add up to one over all ranks."""
    schedule = build(variant, group, 7, step=step)
    weight = dict.fromkeys(group.ranks, Fraction(0))
    for rank in group.ranks:
        members = mean_sets(schedule, rank)
        for other in members:
            weight[other] += Fraction(1, len(members))
    assert set(weight.values()) == {1}


@pytest.mark.parametrize("variant", VARIANTS)
def test_itemsize_does_not_cut_elements(variant: str) -> None:
    group = Group.everybody(Cluster.regular([3, 2], uplink="10mbit"))
    for itemsize in (1, 2, 8):
        schedule = build(variant, group, 1001, itemsize)
        assert sum(schedule.sizes) == 1001
        check(schedule)


def test_the_same_on_every_rank_without_asking() -> None:
    cluster = Cluster.regular([5, 3, 4], uplink="50mbit", interleaved=True)
    for variant in VARIANTS:
        first = build(variant, Group.everybody(cluster), 10_000)
        again = build(variant, Group.everybody(cluster), 10_000)
        assert first.sizes == again.sizes
        assert all(list(first.moves(rank)) == list(again.moves(rank)) for rank in first.ranks)


def test_floats_are_the_same_on_every_rank_and_in_every_run() -> None:
    """Bit for bit: sums are taken in the order of the list, not of arrival."""
    group = Group.everybody(Cluster.regular([3, 4], uplink="50mbit"))
    rng = np.random.default_rng(1)
    for variant, (name, _) in VARIANTS.items():
        if TOPOLOGIES[name].mixes and not TOPOLOGIES[name].groups:
            continue
        schedule = build(variant, group, 999)
        inputs = {rank: rng.standard_normal(999).astype(np.float32) for rank in group.ranks}
        results = [run(schedule, inputs) for _ in range(2)]
        for rank in group.ranks:
            np.testing.assert_array_equal(results[0][rank], results[1][rank])
            np.testing.assert_array_equal(results[0][rank], results[0][0])

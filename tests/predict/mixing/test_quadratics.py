"""Decentralised SGD with the real tables, on quadratics of known L, mu, sigma and zeta.

Replicas stay as near to the optimum as is documented, and as near to each other as is expected."""

from __future__ import annotations

from collections import deque
from math import inf

import numpy as np
import pytest

from tests.predict.mixing.bound import Problem, distance_bound, reach
from tests.predict.mixing.distances import drift
from thalweg.catalog import default_catalog
from thalweg.facts import Cluster
from thalweg.predict.mixing import Matrix, Mixing, MixingBlock, expected_drift, mixing_of
from thalweg.schedules import Group

CATALOG = default_catalog()
WORKERS, VALUES, RUNS = 16, 8, 20  # many runs side by side, for the mean over them
SLOW_RACK = ["250mbit", "1gbit", "1gbit", "1gbit"]
SLOW_HOST = ["1gbit"] * 3 + ["250mbit"] + ["1gbit"] * 12
LR, L, MU, SIGMA = 0.005, 1.0, 0.2, 3.0
CURVATURES = np.geomspace(MU, L, VALUES)


def mixing(plan: str, uplink: str | list[str] = "1gbit", nic: str | list[str] = "1gbit") -> Mixing:
    cluster = Cluster.regular([4] * 4, nic=nic, uplink=uplink)
    return mixing_of(CATALOG.plan(plan), Group.everybody(cluster), CATALOG)


TABLES = {
    "base": mixing("dssync", uplink="2gbit"),
    "pairs": mixing("dssync"),
    "slow rack": mixing("dssync", uplink=SLOW_RACK),
    "slow host": mixing("dssync", uplink="2gbit", nic=SLOW_HOST),
    "slow host, pairs": mixing("dssync", nic=SLOW_HOST),
    "both": mixing("dssync", uplink=SLOW_RACK, nic=SLOW_HOST),
    "all racks slow": mixing("dssync", uplink="250mbit"),
    "gossip": mixing("gossip"),
    "exponential": mixing("gossip(graph=exponential)"),
    "local": mixing("local_sgd(every=4)"),
    "racks": mixing("local_sgd(every=4, levels=rack)"),
    "racks, late": mixing("local_sgd(every=4, levels=rack, delay=1)"),
}


class Replicas:
    """As the runtime does it: what is sent after a step comes back as mean(sent) - sent, at once or
    some steps later, before that step's own exchanges."""

    def __init__(self, mixing: Mixing, values: Matrix) -> None:
        self.mixing = mixing
        self.values = values
        self.under_way: deque[tuple[int, MixingBlock, Matrix]] = deque()

    def step(self, number: int, change: Matrix) -> None:
        self.values = self.values + change
        self._apply(number)
        for exchange in self.mixing.steps[number % len(self.mixing.steps)]:
            sent = self.values[exchange.places]
            moved = exchange.weights @ sent - sent
            self.under_way.append((number + exchange.delay, exchange, moved))
            self._apply(number)

    def _apply(self, number: int) -> None:
        for _ in range(len(self.under_way)):
            due, exchange, moved = self.under_way.popleft()
            if due <= number:
                self.values[exchange.places] += moved
            else:
                self.under_way.append((due, exchange, moved))


@pytest.mark.parametrize("name", TABLES)
def test_noise_alone_makes_the_expected_drift(name: str) -> None:
    table, random = TABLES[name], np.random.default_rng(1)
    replicas = Replicas(table, np.zeros((WORKERS, 400)))
    settling = 200 // table.period * table.period
    measured = []
    for number in range(settling + 480):  # whole periods of all
        replicas.step(number, random.normal(size=replicas.values.shape))
        if number >= settling:
            measured.append(drift(list(replicas.values)).absolute ** 2 / 400)
    expected = expected_drift(table)
    assert np.mean(measured) == pytest.approx(expected.mean(), rel=0.05)
    assert max(measured) < 1.1 * (expected.max() + 1 - 1 / WORKERS)


@pytest.mark.parametrize("heterogeneity", [0.0, 1.0])
@pytest.mark.parametrize("name", TABLES)
def test_the_distance_to_the_optimum_is_below_the_bound(name: str, heterogeneity: float) -> None:
    table, random = TABLES[name], np.random.default_rng(2)
    problem = Problem(smoothness=L, convexity=MU, noise=SIGMA, heterogeneity=heterogeneity)
    pulls = random.normal(size=(WORKERS, VALUES))  # of the ranks' own data, away from the optimum
    pulls -= pulls.mean(axis=0)
    pulls *= heterogeneity / np.sqrt((pulls**2).sum(axis=1).mean())
    first = 1.0
    start = np.full((WORKERS, RUNS, VALUES), np.sqrt(first / VALUES))
    replicas = Replicas(table, start.reshape(WORKERS, -1))
    bound = distance_bound(table, problem, LR)
    assert bound.apart < inf
    for number in range(2400):
        noise = random.normal(0, SIGMA / np.sqrt(VALUES), start.shape)
        values = replicas.values.reshape(start.shape)
        gradients = values * CURVATURES + pulls[:, None] + noise
        replicas.step(number, (-LR * gradients).reshape(WORKERS, -1))
        if number % 50 == 49 or number < 20:
            values = replicas.values.reshape(start.shape)
            measured = (values**2).sum(axis=2).mean()
            assert measured <= bound.after(number + 1, first), f"step {number}"
            apart = ((values - values.mean(axis=0)) ** 2).sum(axis=2).mean()
            assert apart <= bound.apart
    assert bound.of_mean > (values.mean(axis=0) ** 2).sum(axis=1).mean() > bound.of_mean / 10


def test_the_bound_says_something() -> None:
    """Within a few times of what is measured, for noise; heterogeneity is taken at its worst."""
    table = TABLES["base"]
    bound = distance_bound(table, Problem(smoothness=L, convexity=MU, noise=1.0), LR)
    assert bound.apart == pytest.approx(LR**2 * (expected_drift(table).mean() + 1 - 1 / WORKERS))
    assert bound.of_mean == pytest.approx(LR / (WORKERS * MU * (2 - LR * MU)))


def test_where_nothing_is_promised() -> None:
    problem = Problem(smoothness=L, convexity=MU, noise=SIGMA)
    assert distance_bound(TABLES["base"], problem, 1.01).apart == inf
    assert distance_bound(TABLES["base"], problem, 0.99).apart < inf
    assert distance_bound(TABLES["slow rack"], problem, 0.1).apart == inf
    half = np.full((2, 2), 0.5)
    steps = tuple((MixingBlock(np.array(pair), half),) for pair in [(0, 2), (1, 3)])
    assert distance_bound(Mixing(4, 2, steps), problem, LR).apart == inf


def test_reach() -> None:
    """Averaging of everybody every H steps lets H of them add up; gossip takes 1/(1 - lambda)."""
    assert reach(TABLES["local"]) == pytest.approx(4)
    assert reach(mixing("local_sgd(every=1)")) == pytest.approx(1)
    assert reach(TABLES["gossip"]) == pytest.approx(1 / (1 - 0.9493), rel=0.01)
    assert reach(TABLES["base"]) == pytest.approx(4.1, abs=0.05)
    assert reach(TABLES["pairs"]) == pytest.approx(6.6, abs=0.05)


def test_what_the_documentation_says_of_four_racks() -> None:
    table = mixing_of(CATALOG.plan("dssync"), Group.everybody(Cluster.regular([4] * 4)), CATALOG)
    problem = Problem(smoothness=1.0, convexity=0.2, noise=3.0, heterogeneity=1.0)
    bound = distance_bound(table, problem, lr=0.005)
    assert 0.0070 < bound.of_mean < 0.0071
    assert 0.0007 < bound.apart < 0.0008

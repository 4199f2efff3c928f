"""What the straggler study says without a lab, and that it notices a wrong gradient."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from thalweg.bench.run_everywhere import Deployment
from thalweg.codes import Allocation
from thalweg.errors import UsageError
from thalweg.facts import Rate
from thalweg.studies.stragglers.config import (
    SCHEMES,
    UNCOUNTED_ITERATIONS,
    RegularTree,
    Scheme,
    Softmax,
    StragglerTrial,
    distance,
    tolerates,
)
from thalweg.studies.stragglers.tables import compared, row_of, row_of_failure, trials_of
from thalweg.studies.stragglers.trial_run import (
    MIN_COUNTED_ITERATIONS,
    PreparedTrial,
    iterations_to_run,
    run_trial,
)

RATE = Rate.parse("100mbit")
FIGURE_2 = StragglerTrial(
    scheme="cr",
    tree=RegularTree(fanout=4, layers=3, stragglers=1),
    elements=50_000,
    late=0.05,
    delay=2.0,
    compute=0.0,
    iterations=300,
    budget=40.0,
)
SMALL = replace(
    FIGURE_2,
    tree=RegularTree(fanout=2, layers=2, stragglers=1),
    elements=1000,
    late=0.2,
    delay=0.02,
    iterations=12,
    budget=10.0,
)


def site_of(trial: StragglerTrial) -> Deployment:
    """Side by side on this machine."""
    return Deployment(workers=trial.workers + 1, cluster=trial.tree.cluster(RATE))


def allocation_of(trial: StragglerTrial) -> Allocation:
    return trial.allocation(trial.tree.cluster(RATE))


def prepared(trial: StragglerTrial) -> PreparedTrial:
    return PreparedTrial.of(trial, site_of(trial), Softmax(trial.elements, samples=120, models=2))


# Who is late


def test_the_same_workers_are_late_under_every_scheme() -> None:
    late = [replace(FIGURE_2, scheme=scheme).lateness() for scheme in SCHEMES]
    assert all(np.array_equal(each, late[0]) for each in late)
    assert np.array_equal(late[0], FIGURE_2.lateness())
    assert not np.array_equal(late[0], replace(FIGURE_2, seed=1).lateness())
    assert 0.045 < late[0][:, 1:].mean() < 0.055
    assert not late[0][:, 0].any()  # the root


def test_a_longer_trial_begins_as_a_shorter_one_and_more_late_workers_include_the_fewer() -> None:
    shorter, later = replace(FIGURE_2, iterations=20), replace(FIGURE_2, late=0.1)
    assert np.array_equal(shorter.lateness(), FIGURE_2.lateness()[: UNCOUNTED_ITERATIONS + 20])
    assert (later.lateness() >= FIGURE_2.lateness()).all()


def test_nobody_is_late_by_nothing() -> None:
    assert not replace(FIGURE_2, delay=0.0).lateness().any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_a_scheme_tolerates_is_what_its_root_can_decode(scheme: Scheme) -> None:
    """All 64 patterns of the smallest tree: 1, 2 below the root, 3, 4 below 1, and 5, 6 below 2.
    The code lets everybody do the other's work, but who is late passes nothing on."""
    tree = allocation_of(replace(SMALL, scheme=scheme)).tree
    for pattern in product((False, True), repeat=6):
        late = np.array([False, *pattern])
        expected = not late.any()
        if scheme == "gc":  # one team of six
            expected = not late[1:].all()
        if scheme == "cr":
            below = {
                top: [child for child in tree.children[top] if not late[child]] for top in (1, 2)
            }
            expected = any(below[top] and not late[top] for top in (1, 2))
        assert tolerates(tree, late) == expected, pattern


def test_iterations_beyond_the_code_are_counted_among_those_that_count() -> None:
    trial = replace(SMALL, scheme="umw")
    anybody = trial.lateness()[UNCOUNTED_ITERATIONS : UNCOUNTED_ITERATIONS + 7].any(axis=1).sum()
    assert trial.beyond(allocation_of(trial), 7) == anybody > 0


# Schemes, loads and links


def test_plans_of_the_schemes() -> None:
    plans = {scheme: replace(FIGURE_2, scheme=scheme).sync for scheme in SCHEMES}
    assert plans == {
        "umw": "gc(stragglers=0, root=separate)",
        "gc": "gc(stragglers=21, root=separate)",
        "rar": "gc(stragglers=0, root=separate)",
        "cr": "codedreduce(fanout=4, stragglers=1, root=separate)",
    }


@pytest.mark.parametrize(
    ("tree", "stragglers", "loads"),
    [
        ("4x3", 1, {"umw": 1 / 84, "gc": 1 / 3, "rar": 1 / 84, "cr": 1 / 14}),
        ("12x2", 1, {"umw": 1 / 156, "gc": 1 / 11, "rar": 1 / 156, "cr": 1 / 42}),
        ("12x2", 3, {"umw": 1 / 156, "gc": 1 / 3, "rar": 1 / 156, "cr": 1 / 12}),
    ],
)
def test_loads(tree: str, stragglers: int, loads: dict[Scheme, float]) -> None:
    for scheme, load in loads.items():
        trial = replace(FIGURE_2, scheme=scheme, tree=RegularTree.parse(tree, stragglers))
        allocation = allocation_of(trial)
        assert {float(each) for each in allocation.loads.values()} == {load}
        assert allocation.host == 0


def test_link_bounds_at_200_kb_and_100_mbit() -> None:
    """16 ms a message."""
    bounds = {scheme: replace(FIGURE_2, scheme=scheme).link_seconds(RATE) for scheme in SCHEMES}
    assert bounds == pytest.approx(
        {"umw": 84 * 0.016, "gc": 84 * 0.016, "rar": 2 * 83 / 84 * 0.016, "cr": 4 * 0.016}
    )


def test_a_host_for_each_worker_and_one_for_the_root() -> None:
    cluster = FIGURE_2.tree.cluster(RATE)
    assert [len(rack.hosts) for rack in cluster.racks] == [22, 21, 21, 21]
    assert all(rack.uplink is None for rack in cluster.racks)
    assert RegularTree.parse("12x2", 1).cluster(RATE).workers == 157


@pytest.mark.parametrize(
    ("tree", "asked", "more"),
    [("4x3", 1, 3), ("12x2", 1, 3), ("2x2", 1, 1), ("3x2", 0, 2), ("6x2", 1, 2), ("5x1", 0, 4)],
)
def test_more_redundancy_fits_the_tree(tree: str, asked: int, more: int) -> None:
    assert RegularTree.parse(tree, asked).more_redundant().stragglers == more


# Gradients


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cells_sum_to_the_true_gradient(scheme: Scheme) -> None:
    trial, problem = replace(SMALL, scheme=scheme), Softmax(1000, samples=120, models=3)
    allocation = allocation_of(trial)
    for cells, true in zip(problem.gradients(allocation), problem.true_gradients, strict=True):
        assert len(cells) == allocation.cells
        assert distance(np.sum(cells, axis=0, dtype=np.float64), true) < 1e-6


def test_the_true_gradient_is_that_of_the_loss() -> None:
    """By finite differences, at the first model: all zero, so every class is equally likely."""
    problem = Softmax(40, samples=30, models=1)
    inputs, labels = problem._data
    gradient = problem.true_gradients[0].reshape(problem.features, problem.classes)

    def loss(model: Any) -> float:
        scores = inputs.astype(np.float64) @ model
        right = scores[np.arange(len(labels)), labels]
        return float((np.log(np.exp(scores).sum(axis=1)) - right).sum())

    for place in ((0, 0), (3, 1), (19, 0)):
        step = np.zeros_like(gradient)
        step[place] = 1e-4
        slope = (loss(step) - loss(-step)) / 2e-4
        assert gradient[place] == pytest.approx(slope, rel=1e-4)


def test_models_are_as_many_as_memory_has_room_for() -> None:
    assert Softmax.for_workers(84, 50_000, 0).models == 8
    assert Softmax.for_workers(84, 250_000, 0).models == 6
    assert Softmax.for_workers(156, 2_000_000, 0).models == 1


def test_figures_2_gradient_has_ten_classes_of_5000_features() -> None:
    problem = Softmax(FIGURE_2.elements)
    assert (problem.samples, problem.features, problem.classes) == (6552, 5000, 10)


@pytest.mark.parametrize("scheme", ["umw", "gc", "cr"])
def test_one_bit_makes_a_coded_sum_wrong(scheme: Scheme) -> None:
    made = prepared(replace(SMALL, scheme=scheme))
    assert made.schedule is not None
    offsets = made.schedule.offsets
    pieces = [made.right[1][a:b].copy() for a, b in pairwise(offsets)]
    assert made.is_exact(3, pieces)  # the second of two models
    assert not made.is_exact(2, pieces)
    pieces[-1][-1] = np.nextafter(pieces[-1][-1], np.float32(np.inf))
    assert not made.is_exact(3, pieces)


def test_the_ring_may_add_in_another_order() -> None:
    made = prepared(replace(SMALL, scheme="rar"))
    backwards = sum(own[0] for own in reversed(list(made.messages.values())))
    assert isinstance(backwards, np.ndarray)
    assert made.is_exact(0, [backwards])
    assert not made.is_exact(0, [backwards * np.float32(1.0001)])
    assert not made.is_exact(0, [np.full_like(backwards, np.nan)])


# Runs, without a lab


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_gradient_of_every_scheme_is_exact(scheme: Scheme) -> None:
    trial = replace(SMALL, scheme=scheme, compute=0.001)
    reports: list[tuple[int, int]] = []
    made = prepared(trial)
    outcome = run_trial(made, site_of(trial), lambda done, of: reports.append((done, of)))
    row = row_of(made, outcome, RATE)
    assert (row["exact"], row["wrong"], row["iterations"], row["error"]) == (True, 0, 12, None)
    assert row["p5"] <= row["p50"] <= row["p95"] <= row["p99"] <= max(row["seconds"])
    if scheme in ("umw", "rar"):  # they wait for everybody
        assert row["mean"] >= row["waits"] > 0
    assert reports
    assert all(done <= max(of, UNCOUNTED_ITERATIONS) for done, of in reports)


def test_workers_that_are_away_come_back() -> None:
    trial = replace(SMALL, way="away", late=0.3)
    made = prepared(trial)
    row = row_of(made, run_trial(made, site_of(trial), lambda done, of: None), RATE)
    assert (row["exact"], row["iterations"]) == (True, 12)
    assert row["beyond"] is row["waits"] is None


@pytest.mark.parametrize("scheme", ["umw", "rar"])
def test_a_tampered_message_is_reported(scheme: Scheme) -> None:
    """Of one worker, for the second model of two: every other gradient is wrong."""
    trial = replace(SMALL, scheme=scheme, late=0.0)
    made = prepared(trial)
    first, second = made.messages[5]
    tampered = {**made.messages, 5: [first, second + np.float32(0.1)]}
    outcome = run_trial(replace(made, messages=tampered), site_of(trial), lambda done, of: None)
    assert outcome["wrong"] == list(range(1, UNCOUNTED_ITERATIONS + 12, 2))
    row = row_of(made, outcome, RATE)
    assert (row["exact"], row["wrong"]) == (False, 9)


# Rows and tables


def test_iterations_are_as_asked_or_as_the_budget_allows() -> None:
    trial = replace(FIGURE_2, iterations=100, budget=10.0)
    assert iterations_to_run(trial, [0, 0.01, 0.02]) == 100
    assert iterations_to_run(trial, [0, 0.5, 1.0]) == 20
    assert iterations_to_run(trial, [0, 5.0, 10.0]) == MIN_COUNTED_ITERATIONS
    assert iterations_to_run(replace(trial, iterations=3), [0, 5.0, 10.0]) == 3


def test_figures_of_a_row() -> None:
    made = prepared(SMALL)
    row = row_of(made, {"seconds": list(range(1, 102)), "wrong": []}, RATE)
    assert [row[key] for key in ("mean", "p5", "p50", "p95", "p99")] == [51, 6, 51, 96, 100]
    failed = row_of_failure(SMALL, RATE, "it broke")
    assert failed.keys() == row.keys()
    assert (failed["exact"], failed["mean"], failed["error"]) == (False, None, "it broke")


def test_tables_share_their_trials() -> None:
    held, delays, compute, pauses = (
        trials_of(name, FIGURE_2) for name in ("held", "delays", "compute", "pauses")
    )
    assert [trial.scheme for trial in held] == list(SCHEMES)
    assert set(held) < set(delays)
    assert set(held) < set(compute)
    assert [trial.delay for trial in delays[::4]] == [0.0, 0.5, 2.0]
    assert [trial.compute for trial in compute[::4]] == [0.0, 0.2]
    assert [trial.tree.stragglers for trial in pauses] == [1, 1, 1, 1, 3]
    assert {trial.way for trial in pauses} == {"away"}
    assert len(trials_of("surface", FIGURE_2)) == 3 * 2 * 3 * 4


def test_speedups_are_within_one_setting() -> None:
    def row(scheme: Scheme, delay: float, mean: float) -> dict[str, Any]:
        trial = replace(FIGURE_2, scheme=scheme, delay=delay)
        made = row_of_failure(trial, RATE, "")
        return {**made, "mean": mean, "p95": 2 * mean}

    rows = [row("umw", 0.0, 2.0), row("cr", 0.0, 1.0), row("umw", 2.0, 4.4), row("cr", 2.0, 1.1)]
    found = compared("delays", rows)
    assert [each["cr_speedup"] for each in found] == pytest.approx([2, 1, 4, 1])
    assert [each["p95_vs_none_late"] for each in found] == pytest.approx([1, 1, 2.2, 1.1])
    rows[1]["mean"] = None  # it failed
    assert [each["cr_speedup"] for each in compared("delays", rows)][:2] == [None, None]


# Mistakes


@pytest.mark.parametrize(
    ("tree", "stragglers", "problem"),
    [
        ("4", 1, "'4' is not a tree"),
        ("4x", 1, "'4x' is not a tree"),
        ("1x3", 0, "a tree can't have"),
        ("4x0", 1, "a tree can't have"),
        ("4x3", 4, "a parent of 4 children can't tolerate 4"),
        ("4x3", 2, "4 children can't be split into teams of 3"),
        ("20x2", 1, "too many workers"),
        ("999999x999999", 1, "too many workers"),
    ],
)
def test_trees_that_are_refused(tree: str, stragglers: int, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        RegularTree.parse(tree, stragglers)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"late": 1.5}, "1.5 is not a probability; give one from 0 to 1"),
        ({"late": float("nan")}, "nan is not a probability"),
        ({"elements": 1}, "too short for two classes"),
        ({"elements": 5_000_000}, "don't fit into memory"),
        ({"delay": 100.0}, "100 s is too long"),
    ],
)
def test_trials_that_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        replace(FIGURE_2, **change)

from __future__ import annotations

import numpy as np
import pytest

from tests.running import DOUBLE
from thalweg.catalog import parse_plan
from thalweg.engine.first_k_node import FirstKNode
from thalweg.engine.tree_node import pieces_of
from thalweg.errors import LayoutError
from thalweg.facts import Cluster
from thalweg.redundancy import allocation_of, fastest
from thalweg.schedules import Group, coded_tree
from thalweg.transports import Array
from thalweg.transports.best_effort import BestEffortMessage

WORKERS, K = 5, 3
ELEMENTS = 4


class Star:
    """All nodes; messages are delivered at once, in order."""

    def __init__(self) -> None:
        group = Group.everybody(Cluster.flat(WORKERS))
        allocation = allocation_of(parse_plan(f"lgc(k={K})"), group)
        schedule = coded_tree(group, ELEMENTS, 8, allocation)
        self.nodes = {
            rank: FirstKNode(rank, pieces_of([schedule], [DOUBLE], rank), allocation, k=K)
            for rank in group.ranks
        }

    def contribute(self, step: int, *ranks: int) -> None:
        for rank in ranks:
            self._deliver(rank, self.nodes[rank].contribute(step, 0, gradient(rank, step)))

    def _deliver(self, sender: int, messages: list[BestEffortMessage]) -> None:
        for message in messages:
            received = message._replace(peer=sender)
            self._deliver(message.peer, self.nodes[message.peer].arrive(received))

    def result(self, step: int, rank: int = 4) -> Array | None:
        found = self.nodes[rank].finished.get(step)
        return None if found is None else np.concatenate(found.arrays)


def gradient(rank: int, step: int) -> Array:
    """A worker's part of the sum."""
    return np.random.default_rng((rank, step)).standard_normal(ELEMENTS)


def mean_of(step: int, *ranks: int) -> Array:
    """The estimate of the sum over all that these make."""
    return WORKERS * np.mean([gradient(rank, step) for rank in ranks], axis=0)


def test_the_first_k_make_the_step() -> None:
    star = Star()
    star.contribute(0, 1, 2)
    assert star.result(0) is None
    star.contribute(0, 4)
    for rank in range(WORKERS):
        np.testing.assert_allclose(star.result(0, rank), mean_of(0, 1, 2, 4))


def test_the_others_count_one_step_late() -> None:
    star = Star()
    star.contribute(0, 1, 2, 4)
    star.contribute(0, 0, 3)  # too late: the root's own worker and another
    star.contribute(1, 0, 1, 2)
    late, used = mean_of(0, 0, 3), mean_of(0, 1, 2, 4)
    expected = mean_of(1, 0, 1, 2) + (WORKERS - K) / WORKERS * (late - used)
    np.testing.assert_allclose(star.result(1), expected)
    star.contribute(2, 2, 3, 4)  # nobody was late for step 1 that has told
    np.testing.assert_allclose(star.result(2), mean_of(2, 2, 3, 4))


def test_what_was_missed_then_is_made_up_for() -> None:
    """With the same gradients at every step, results and compensations add up to the mean."""
    star = Star()
    steps = 50
    for step in range(steps):
        same = {rank: gradient(rank, 0) for rank in range(WORKERS)}
        for rank in (1, 2, 4, 0, 3):
            star._deliver(rank, star.nodes[rank].contribute(step, 0, same[rank]))
    total = sum(star.result(step) for step in range(steps - 10, steps))
    np.testing.assert_allclose(total / 10, mean_of(0, *range(WORKERS)))


def test_what_is_older_is_dropped() -> None:
    star = Star()
    star.contribute(0, 1, 2, 4)
    star.contribute(1, 1, 2, 4)
    star.contribute(0, 0, 3)
    star.contribute(2, 1, 2, 4)
    np.testing.assert_allclose(star.result(2), mean_of(2, 1, 2, 4))


@pytest.mark.parametrize(("workers", "k"), [(1, 1), (2, 1), (5, 4), (10, 9), (20, 18), (84, 76)])
def test_nine_of_ten_are_waited_for(workers: int, k: int) -> None:
    assert fastest(parse_plan("lgc"), workers) == k


def test_more_than_there_are() -> None:
    with pytest.raises(LayoutError, match="k=9 is more than the 8 workers"):
        fastest(parse_plan("lgc(k=9)"), 8)

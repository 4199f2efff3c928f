"""What the plan leaves open is chosen by who is late, and how often; who is sits far from the
root."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from tests.codes.trees import is_decoded, planted
from thalweg import Group, parse_plan
from thalweg.codes import TREE_ROOT, Allocation
from thalweg.codes.fractional import team_tree
from thalweg.codes.tolerance import chance_of_waiting
from thalweg.facts import Cluster, Duration, StragglerDelay, parse_cluster
from thalweg.redundancy import (
    DEFAULT_FANOUT,
    DEFAULT_STRAGGLER_COUNT,
    allocation_of,
    choose,
    estimate,
    most_reliable_first,
)

NEVER = StragglerDelay()


def late(probability: float, seconds: float) -> StragglerDelay:
    return StragglerDelay(probability=probability, delay=Duration(seconds))


@pytest.mark.parametrize("workers", [2, 7, 20, 84])
def test_where_nobody_is_late_nothing_is_computed_twice(workers: int) -> None:
    _, stragglers = choose(workers, NEVER, compute=1.0, message=0.01)
    assert stragglers == 0


@pytest.mark.parametrize("workers", [7, 20, 84])
def test_against_pauses_redundancy_pays(workers: int) -> None:
    """The more, the more often: delays that don't grow with the load."""
    chosen = [
        choose(workers, late(often, 5.0), compute=1.0, message=0.01)[1]
        for often in (0, 0.001, 0.05, 0.3)
    ]
    assert chosen == sorted(chosen)
    assert chosen[0] == 0
    assert chosen[2] >= 1
    assert chosen[3] >= 2


def test_a_delay_that_is_shorter_than_the_work_is_waited_for() -> None:
    """Replicas would double the work of every step to save a little in some."""
    assert choose(20, late(0.05, 0.05), compute=10.0, message=0.001)[1] == 0


def test_what_the_plan_says_stays() -> None:
    delay = late(0.05, 2.0)
    for fanout, stragglers in ((3, 2), (4, 1), (12, 0)):
        found = choose(30, delay, compute=1.0, message=0.01, fanout=fanout, stragglers=stragglers)
        assert found == (fanout, stragglers)
    assert choose(30, delay, compute=1.0, message=0.01, stragglers=2)[1] == 2
    assert choose(30, delay, compute=1.0, message=0.01, fanout=6)[0] == 6


def test_the_estimate_is_what_its_parts_say() -> None:
    tree = team_tree(range(20), 4, 1)
    waits = chance_of_waiting(tree, dict.fromkeys(tree.workers, 0.05))
    seconds = estimate(20, 4, 1, late(0.05, 2.0), compute=6.0, message=0.25)
    assert seconds == pytest.approx(6.0 / 6 + 2 * 4 * 0.25 + waits * 2.0)


@pytest.mark.parametrize(("fanout", "stragglers"), [(4, 1), (3, 2), (2, 1), (7, 1), (3, 0)])
@pytest.mark.parametrize("often", [0.0, 0.1, 0.5, 1.0])
def test_the_chance_of_waiting_is_that_of_all_patterns(
    fanout: int, stragglers: int, often: float
) -> None:
    workers = 7
    allocation = planted("fractional", workers, fanout, stragglers)
    patterns = chain.from_iterable(combinations(range(workers), n) for n in range(workers + 1))
    expected = sum(
        often ** len(slow) * (1 - often) ** (workers - len(slow))
        for slow in patterns
        if not is_decoded(allocation, slow)
    )
    late = dict.fromkeys(range(workers), often)
    assert chance_of_waiting(allocation.tree, late) == pytest.approx(expected)


CLUSTER = """
[[rack]]
name = "a"
nic = "1gbit"
hosts = [
    {{ name = "a0", late = {{ probability = 0.2, delay = "2s" }} }},
    {{ name = "a1" }},
    {{ name = "a2", late = {{ probability = 0.2, delay = "1s" }} }},
    {{ name = "a3" }},
]
[[rack]]
name = "b"
nic = "1gbit"
hosts = {others}
"""


def coded(text: str, cluster: Cluster) -> Allocation:
    return allocation_of(parse_plan(text), Group.everybody(cluster))


def test_the_most_reliable_hosts_are_near_the_root() -> None:
    cluster = parse_cluster(CLUSTER.format(others=16))
    order = most_reliable_first(Group.everybody(cluster))
    assert order == [1, 3, *range(4, 20), 2, 0]
    allocation = coded("codedreduce(fanout=4, stragglers=1)", cluster)
    assert allocation.host == 1
    assert allocation.tree.children[TREE_ROOT] == (3, 4, 5, 6)
    assert not allocation.tree.children[0]
    assert not allocation.tree.children[2]
    assert not allocation.tree.children[1]  # it has the root to look after
    separate = coded("codedreduce(fanout=4, stragglers=1, root=separate)", cluster)
    assert separate.host == 1
    assert 1 not in separate.workers


def test_where_nobody_has_measured_lateness_a_little_is_assumed() -> None:
    allocation = coded("codedreduce", Cluster.flat(20))
    assert {len(below) for below in allocation.tree.children.values()} == {0, DEFAULT_FANOUT}
    assert {code.stragglers for code in allocation.tree.codes.values()} == {DEFAULT_STRAGGLER_COUNT}


def test_a_cluster_file_that_says_who_is_late_settles_the_rest() -> None:
    """Most hosts late by seconds, three steps in ten: more than one straggler."""
    hosts = ", ".join(
        f'{{ name = "b{i}", late = {{ probability = 0.3, delay = "5s" }} }}' for i in range(16)
    )
    often = coded("codedreduce", parse_cluster(CLUSTER.format(others=f"[{hosts}]")))
    assert min(code.stragglers for code in often.tree.codes.values()) > DEFAULT_STRAGGLER_COUNT
    star = coded("gc", parse_cluster(CLUSTER.format(others=f"[{hosts}]")))
    assert star.tree.depth == 1
    assert star.tree.codes[TREE_ROOT].stragglers >= 2
    fixed = coded("codedreduce(stragglers=0)", parse_cluster(CLUSTER.format(others="16")))
    assert {code.stragglers for code in fixed.tree.codes.values()} == {0}

"""Closed forms of coded steps, against the tree that is allocated and against figures by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.predict import coded_forms
from tests.predict.coded_forms import Message, ShiftedExponential, Tree
from thalweg.catalog import parse_plan
from thalweg.codes.tolerance import chance_of_waiting
from thalweg.facts import Cluster, Duration, StragglerDelay
from thalweg.redundancy import allocation_of
from thalweg.schedules import Group

SMALL, WIDE = Tree(4, 3, 1), Tree(12, 2, 3)
UNIT = Message(0.25, 0.75)


def test_what_is_sent() -> None:
    """(4, 3): 84 workers, 9 messages one after the other; UMW / CR is 9.3, GC (S = 21) / CR 7.0."""
    assert (SMALL.workers, WIDE.workers) == (84, 156)
    coded = coded_forms.codedreduce(SMALL).communication(UNIT)
    assert coded == 9
    assert coded_forms.umw(84).communication(UNIT) / coded == pytest.approx(9.3, abs=0.05)
    assert coded_forms.gc(84, 21).communication(UNIT) / coded == pytest.approx(7.0)
    assert coded_forms.ring(84).communication(UNIT) == pytest.approx(166 * (0.25 + 0.75 / 84))


def test_when_a_ring_overtakes() -> None:
    assert coded_forms.ring_overtakes_at(SMALL) == pytest.approx(22, abs=0.5)
    assert coded_forms.ring_overtakes_at(WIDE) == pytest.approx(18, abs=0.5)
    gigabit, latency = 1e9 / 8, 0.2e-3
    size = coded_forms.ring_overtakes(SMALL, latency, gigabit)
    assert size == pytest.approx(0.56e6, rel=0.01)
    message = Message(latency, size / gigabit)
    coded, ring = coded_forms.codedreduce(SMALL), coded_forms.ring(84)
    assert coded.communication(message) == pytest.approx(ring.communication(message))


def test_a_ring_that_never_overtakes() -> None:
    """Of two children one is enough: one message, and a ring sends as many bytes in two."""
    assert coded_forms.ring_overtakes_at(Tree(2, 1, 1)) == float("inf")


@pytest.mark.parametrize(("fanout", "levels", "stragglers"), [(4, 2, 1), (3, 2, 2), (2, 3, 1)])
def test_load_and_waiting_are_those_of_the_allocation(
    fanout: int, levels: int, stragglers: int
) -> None:
    tree = Tree(fanout, levels, stragglers)
    cluster = Cluster.regular([tree.workers], nic="1gbit", uplink="1gbit")
    plan = parse_plan(f"codedreduce(fanout={fanout}, stragglers={stragglers}, code=cyclic)")
    allocation = allocation_of(plan, Group.everybody(cluster))
    assert allocation.tree.depth == levels
    loads = {float(load) * tree.workers for load in allocation.loads.values()}
    assert sorted(loads) == pytest.approx([tree.load])
    delay = StragglerDelay(probability=0.1, delay=Duration(3.0))
    chance = chance_of_waiting(allocation.tree, dict.fromkeys(allocation.workers, 0.1))
    assert coded_forms.codedreduce(tree).waiting(delay) == pytest.approx(3 * chance)


def test_waiting_by_hand() -> None:
    """Of two children one may be late, in two levels. A leaf is late with p; a parent if it is
    itself, or both of its leaves are; the step if both parents are."""
    p = 0.1
    delay = StragglerDelay(probability=p, delay=Duration(3.0))
    parent = 1 - (1 - p) * (1 - p**2)
    assert coded_forms.codedreduce(Tree(2, 2, 1)).waiting(delay) == pytest.approx(3 * parent**2)
    assert coded_forms.umw(6).waiting(delay) == pytest.approx(3 * (1 - 0.9**6))
    assert coded_forms.ring(6).waiting(delay) == coded_forms.umw(6).waiting(delay)
    one = 6 * 0.1 * 0.9**5
    assert coded_forms.gc(6, 1).waiting(delay) == pytest.approx(3 * (1 - 0.9**6 - one))


def test_a_step_adds_up() -> None:
    form = coded_forms.gc(6, 1)
    delay = StragglerDelay(probability=0.1, delay=Duration(3.0))
    expected = 2 * 0.5 + form.waiting(delay) + 5 * 1.0
    assert form.seconds(UNIT, 0.5, delay) == pytest.approx(expected)


def test_tails() -> None:
    """Waiting for all, and for all but one, is what the order statistics say; a tree of one level
    is a gradient code."""
    one = ShiftedExponential(1.0, 0.5)
    assert coded_forms.umw(6).computing(one) == pytest.approx(one.expected_latest(6), rel=1e-6)
    coded = one.expected_arrival(6, 5)
    assert coded_forms.gc(6, 1).computing(one) == pytest.approx(coded, rel=1e-6)
    assert coded_forms.codedreduce(Tree(6, 1, 1)).computing(one) == pytest.approx(coded, rel=1e-6)


def test_what_the_documentation_says_of_20_workers() -> None:
    tree = Tree(children=4, levels=2, stragglers=1)
    latency, bytes_per_second = 200e-6, 1e9 / 8
    overtaken = coded_forms.ring_overtakes(tree, latency, bytes_per_second)
    assert overtaken == pytest.approx(latency * bytes_per_second * (38 - 6) / (6 - 38 / 20))
    message = Message(latency, 10e6 / bytes_per_second)
    delay = StragglerDelay(probability=0.05, delay=Duration(2.0))
    forms = {
        "umw": coded_forms.umw(20),
        "gc": coded_forms.gc(20, stragglers=1),
        "codedreduce": coded_forms.codedreduce(tree),
        "ring": coded_forms.ring(20),
    }
    page = Path(__file__).parents[2] / "docs" / "what-will-it-cost-me.md"
    for name, form in forms.items():
        [line] = re.findall(rf"^\| `?{name}\b.* s \|.*$", page.read_text(), re.MULTILINE)
        told = [float(figure) for figure in re.findall(r"\d+\.\d+(?= s)", line)]
        assert told == [round(form.communication(message), 3), round(form.waiting(delay), 3)]

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from tests.report.explain.test_svg import explained
from thalweg.codes import TREE_ROOT
from thalweg.report.explain.coded_plan import BatchPart, RootTraffic


@pytest.mark.parametrize(("fanout", "layers", "stragglers"), [(4, 2, 1), (3, 2, 2), (2, 3, 0)])
def test_costs_of_a_regular_tree(fanout: int, layers: int, stragglers: int) -> None:
    """The root's process has the last leaf: it answers another worker, which needn't send it the
    result. So much for the bytes; computing is the paper's."""
    parents, leaves = sum(fanout**layer for layer in range(1, layers)), fanout**layers
    number = parents + leaves
    plan = f"codedreduce(fanout={fanout}, stragglers={stragglers})"
    explanation = explained(plan, [number], "4KB")
    view = explanation.coded
    assert view is not None
    traffic, size = explanation.traffic, explanation.workload.nbytes
    root, tree = view.allocation.host, view.allocation.tree
    [*_, last_layer] = tree.layers()
    above = tree.parents[root]
    assert (last_layer[-1], tree.children[above][-1]) == (root, root)
    assert view.root_answers == above
    assert view.at_root == RootTraffic(
        data=size, results=fanout * size, answers=size, received=fanout * size
    )
    assert traffic.sent[root] == view.at_root.sent == (fanout + 1) * size
    assert traffic.received[root] == fanout * size
    assert traffic.sent[above] == fanout * size
    for rank in set(tree.workers) - {root}:
        below = tree.children[rank]
        assert traffic.sent[rank] == (1 + len(set(below) - {root})) * size
        assert traffic.received[rank] == (len(below) + 1) * size
    by_the_formula = {fanout + 1: parents - 1 + 1, fanout: 1, 1: leaves - 1}  # + 1: the root's
    assert Counter(nbytes // size for nbytes in traffic.sent.values()) == by_the_formula
    q = Fraction(fanout, stragglers + 1)
    assert set(view.allocation.loads.values()) == {
        1 / sum((q**layer for layer in range(1, layers + 1)), start=Fraction(0))
    }
    assert view.redundancy == number * view.allocation.loads[0]
    assert explanation.sequential_moves is not None
    assert explanation.sequential_moves <= 2 * fanout * layers


def test_costs_of_a_star() -> None:
    explanation = explained("gc(stragglers=2)", [12], "4KB")
    view = explanation.coded
    assert view is not None
    assert set(view.allocation.loads.values()) == {Fraction(3, 12)}
    size = explanation.workload.nbytes
    assert explanation.traffic.sent == {0: 11 * size} | dict.fromkeys(range(1, 12), size)
    assert view.allocation.tree.children[TREE_ROOT] == tuple(range(12))
    assert view.root_answers is None  # nobody but the root, without a message
    assert view.at_root == RootTraffic(data=size, results=11 * size, answers=0, received=11 * size)
    assert explanation.sequential_moves is not None
    assert explanation.sequential_moves <= 2 * 12


def test_neighbouring_cells_of_one_weight_are_one_part() -> None:
    view = explained("gc(stragglers=3, code=cyclic_mds)", [12]).coded
    assert view is not None
    first, *_, last = view.allocation.tree.children[TREE_ROOT]
    cell, weight = Fraction(1, 12), pytest.approx(1 + 3**0.5)
    assert view.parts(first)[1] == BatchPart(1 * cell, 3 * cell, weight)
    # The last has the same weights eleven cells further, round the end.
    assert first == view.allocation.host
    assert view.parts(last) == [
        BatchPart(0 * cell, 2 * cell, weight),
        BatchPart(2 * cell, 3 * cell, pytest.approx(1)),
        BatchPart(11 * cell, 12 * cell, pytest.approx(1)),
    ]


def test_a_root_among_its_own_children_sends_no_answer() -> None:
    """Twelve fill two teams and what is below one of them; the last is a spare member above."""
    explanation = explained("codedreduce(fanout=4, stragglers=1)", [13], "4KB")
    view = explanation.coded
    assert view is not None
    tops, size = view.allocation.tree.children[TREE_ROOT], explanation.workload.nbytes
    assert (view.allocation.tree.depth, tops[-1]) == (2, view.allocation.host)
    others = (len(tops) - 1) * size
    assert view.root_answers is None
    assert view.at_root == RootTraffic(data=size, results=others, answers=0, received=others)


def test_compressed_results_are_counted_as_they_are_sent() -> None:
    explanation = explained("codedreduce(fanout=2, stragglers=1)+fp16", [6], "4KB")
    assert explanation.coded is not None
    size = explanation.workload.nbytes
    half = size // 2
    assert explanation.coded.at_root == RootTraffic(
        data=size, results=2 * half, answers=half, received=2 * half
    )


@pytest.mark.parametrize("plan", ["lgc(k=2)", "asp"])
def test_bytes_without_rounds(plan: str) -> None:
    explanation = explained(plan, [3, 2], "4KB")
    size = explanation.workload.nbytes
    assert explanation.traffic.sent == {0: 4 * size, 1: size, 2: size, 3: size, 4: size}
    links = {str(link): nbytes for link, nbytes in explanation.traffic.links.items()}
    assert links["uplink of rack1, out"] == links["uplink of rack1, in"] == 2 * size


def test_compressed_gradients_are_smaller_on_their_way_up() -> None:
    found = explained("lgc(k=2)+fp16", [4], "4MB").async_plan
    assert found is not None
    assert 2 * found.up_nbytes == found.down_nbytes

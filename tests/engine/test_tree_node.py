"""One rank of a coded tree, message by message."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
import torch

from tests.codes.trees import planted
from tests.running import DOUBLE, SimulatedTree, contributions, tree_schedule
from thalweg.codes import Allocation
from thalweg.engine import tree_node
from thalweg.engine.arithmetic import arithmetic_of
from thalweg.engine.tree_node import (
    MAX_OPEN_STEPS,
    MAX_RESULT_HISTORY_STEPS,
    ElementType,
    Node,
    pieces_of,
)
from thalweg.errors import TransportError
from thalweg.facts import Cluster, Duration
from thalweg.schedules import Group, coded_tree
from thalweg.transports.best_effort import BestEffortMessage, MessageKind

#           root, with 0
#          0            1        the first cell
#        2   3        4   5      the second
SMALL = planted("fractional", 6, 2, 1)
TWENTY = planted("fractional", 20, 4, 1)


def alone(rank: int, rounds: int = 1, elements: int = 3, form: ElementType = DOUBLE) -> Node:
    schedules = [tree_schedule(SMALL, elements, form.dtype.itemsize)] * rounds
    return Node(rank, pieces_of(schedules, [form] * rounds, rank), SMALL)


def incoming(
    peer: int, kind: MessageKind, value: float, step: int = 0, piece: int = 0, elements: int = 3
) -> BestEffortMessage:
    return BestEffortMessage(peer, kind, step, piece, 0, np.full(elements, value))


def outline(messages: list[BestEffortMessage]) -> list[tuple[int, str, int, int]]:
    return [(message.peer, message.kind.name, message.step, message.piece) for message in messages]


def values(message: BestEffortMessage) -> float:
    assert message.array is not None
    assert message.array.min() == message.array.max()
    return float(message.array[0])


def test_the_tree_of_these_tests() -> None:
    assert SMALL.tree.children[0] == (2, 3)
    assert SMALL.tree.children[1] == (4, 5)
    assert SMALL.above == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
    assert SMALL.below == {0: (1, 2, 3), 1: (4, 5), 2: (), 3: (), 4: (), 5: ()}


def test_answers_are_decoded_and_added_and_sent_up() -> None:
    one = alone(1)
    assert one.contribute(0, 0, np.full(3, 1.0)) == []
    [answer] = one.arrive(incoming(5, MessageKind.ANSWER, 10.0))
    assert outline([answer]) == [(0, "ANSWER", 0, 0)]
    assert values(answer) == 11.0
    assert one.arrive(incoming(4, MessageKind.ANSWER, 10.0)) == []  # late: its team has answered


def test_a_late_rank_passes_results_on_before_it_has_contributed() -> None:
    one = alone(1)
    assert one.arrive(incoming(4, MessageKind.ANSWER, 10.0)) == []
    result = incoming(0, MessageKind.RESULT, 11.0)
    passed_on = one.arrive(result)
    assert outline(passed_on) == [(4, "RESULT", 0, 0), (5, "RESULT", 0, 0)]
    assert all(sent.array is result.array for sent in passed_on)
    assert one.floor == 1
    assert one.contribute(0, 0, np.full(3, 1.0)) == []


def test_results_of_steps_that_a_rank_had_no_part_in() -> None:
    one = alone(1)
    for step in range(10):
        one.arrive(incoming(0, MessageKind.RESULT, float(step), step=step))
    assert one.floor == 10
    assert [one.finished[step].arrays[0][0] for step in range(10)] == list(range(10))


def test_the_root_goes_on_without_its_own_worker() -> None:
    root = alone(0)
    sent = root.arrive(incoming(1, MessageKind.ANSWER, 11.0))
    assert outline(sent) == [(peer, "RESULT", 0, 0) for peer in (1, 2, 3)]
    assert root.finished[0].covered == 0
    assert root.contribute(0, 0, np.full(3, 1.0)) == []


def test_what_is_stale_is_dropped() -> None:
    root = alone(0)
    root.arrive(incoming(1, MessageKind.ANSWER, 11.0))
    for kind in (
        MessageKind.ANSWER,
        MessageKind.RESULT,
        MessageKind.PARTIAL,
        MessageKind.REQUEST_PARTIAL,
    ):
        for peer in (1, 2):
            assert root.arrive(incoming(peer, kind, 99.0)) == []
    assert root.finished[0].arrays[0].tolist() == [11.0] * 3
    root.skip_to(5)
    assert root.contribute(4, 0, np.ones(3)) == []
    assert root.arrive(incoming(1, MessageKind.ANSWER, 11.0, step=4)) == []
    assert root.arrive(incoming(1, MessageKind.ANSWER, 11.0, step=5))
    assert sorted(root.finished) == [0, 5]


def test_a_later_result_ends_earlier_steps() -> None:
    one = alone(1)
    one.contribute(0, 0, np.ones(3))
    one.arrive(incoming(0, MessageKind.RESULT, 7.0, step=2))
    assert one.floor == 3
    assert list(one.finished) == [2]
    assert one.arrive(incoming(4, MessageKind.ANSWER, 10.0, step=0)) == []


def test_no_more_steps_are_open_than_allowed() -> None:
    """The oldest has to go, and can't come back."""
    one = alone(1)
    for step in range(MAX_OPEN_STEPS + 1):
        one.arrive(incoming(4, MessageKind.ANSWER, 10.0, step=step))
    assert one.contribute(0, 0, np.full(3, 1.0)) == []
    for step in range(1, MAX_OPEN_STEPS + 1):
        assert outline(one.contribute(step, 0, np.full(3, 1.0))) == [(0, "ANSWER", step, 0)]


def test_who_follows_gets_what_is_kept_and_what_comes() -> None:
    one = alone(1, rounds=2)
    for step in range(3):
        for piece in range(2):
            one.arrive(incoming(0, MessageKind.RESULT, float(step), step=step, piece=piece))
    one.arrive(incoming(0, MessageKind.RESULT, 3.0, step=3, piece=1))
    kept = one.arrive(BestEffortMessage(9, MessageKind.FOLLOW, 1))
    expected = [(9, "RESULT", step, piece) for step in (1, 2) for piece in (0, 1)]
    assert outline(kept) == [*expected, (9, "RESULT", 3, 1)]
    coming = one.arrive(incoming(0, MessageKind.RESULT, 3.0, step=3, piece=0))
    assert outline(coming) == [(peer, "RESULT", 3, 0) for peer in (4, 5, 9)]
    one.followers.discard(9)
    assert len(one.arrive(incoming(0, MessageKind.RESULT, 4.0, step=4))) == 2


def test_a_child_that_follows_gets_everything_once() -> None:
    one = alone(1)
    one.arrive(BestEffortMessage(4, MessageKind.FOLLOW, 0))
    assert outline(one.arrive(incoming(0, MessageKind.RESULT, 1.0))) == [
        (4, "RESULT", 0, 0),
        (5, "RESULT", 0, 0),
    ]


def test_pieces_make_their_own_way() -> None:
    """Each from whoever sent it first; a result ends its own piece alone."""
    root = alone(0, rounds=2)
    root.contribute(0, 1, np.full(3, 1.0))
    assert outline(root.arrive(incoming(2, MessageKind.ANSWER, 20.0, piece=1))) == [
        (peer, "RESULT", 0, 1) for peer in (1, 2, 3)
    ]
    assert not root.finished
    assert root.floor == 0
    root.arrive(incoming(3, MessageKind.ANSWER, 10.0, piece=0))
    sent = root.contribute(0, 0, np.full(3, 2.0))
    assert {values(message) for message in sent} == {12.0}
    assert [array[0] for array in root.finished[0].arrays] == [12.0, 21.0]


def test_chunks_of_a_round_are_pieces() -> None:
    schedule = tree_schedule(SMALL, 6_000_000, 4)
    single = ElementType(np.dtype(np.float32))
    pieces = pieces_of([schedule], [single], 1)
    assert len(pieces) == len(schedule.sizes) > 3
    assert [(piece.start, piece.stop) for piece in pieces] == [
        (start, stop) for start, stop in zip(schedule.offsets, schedule.offsets[1:], strict=False)
    ]
    leaf = Node(4, pieces_of([schedule], [single], 4), SMALL)
    vector = np.arange(6_000_000, dtype=np.float32)
    sent = leaf.contribute(0, 0, vector)
    assert outline(sent) == [(1, "ANSWER", 0, piece) for piece in range(len(pieces))]
    np.testing.assert_array_equal(
        np.concatenate([message.array for message in sent if message.array is not None]), vector
    )


def test_fewer_elements_than_chunks() -> None:
    """Empty pieces take their way too."""
    instant = Group.everybody(Cluster.regular([6], latency=Duration(0)))
    schedule = coded_tree(instant, 1, 8, SMALL)
    assert 0 in schedule.sizes
    inputs = {worker: np.ones(1) for worker in SMALL.workers}
    for results in SimulatedTree(SMALL, schedule).run(inputs, late=(0, 5)).values():
        assert results is not None
        assert np.concatenate(results.arrays).tolist() == [2.0]


@pytest.mark.parametrize("kind", [MessageKind.ANSWER, MessageKind.RESULT, MessageKind.PARTIAL])
def test_a_message_of_another_size_is_refused(kind: MessageKind) -> None:
    message = (
        r"rank 1 expected 24 bytes from rank 4 at step 0, piece 0, and got 16; "
        "give all ranks the same model and plan"
    )
    with pytest.raises(TransportError, match=message):
        alone(1).arrive(incoming(4, kind, 1.0, elements=2))
    with pytest.raises(TransportError, match=r"piece 0, and got 0"):
        alone(1).arrive(BestEffortMessage(4, kind, 0))
    with pytest.raises(TransportError, match=r"expected 0 bytes .* piece 1, and got 24"):
        alone(1).arrive(incoming(4, kind, 1.0, piece=1))


def test_contributions_are_left_alone() -> None:
    rng = np.random.default_rng(0)
    cells = rng.standard_normal((TWENTY.cells, 40))
    inputs = contributions(TWENTY, cells)
    copies = {rank: vector.copy() for rank, vector in inputs.items()}
    simulated = SimulatedTree(TWENTY, tree_schedule(TWENTY, 40))
    for slow in ((), (0, 3), (1, 2)):
        assert all(simulated.run(inputs, late=slow).values())
    for rank, vector in inputs.items():
        np.testing.assert_array_equal(vector, copies[rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bytes_from_the_network(dtype: torch.dtype) -> None:
    """Read-only, and without a type."""
    own = torch.full((3,), 1.5, dtype=dtype)
    numpy_type = np.dtype(np.float32 if dtype is torch.float32 else np.int16)
    form = ElementType(numpy_type, arithmetic_of(dtype))
    one = alone(1, form=form)
    came = np.frombuffer(
        torch.full((3,), 2.25, dtype=dtype).view(torch.uint8).numpy().tobytes(), "u1"
    )
    one.arrive(BestEffortMessage(5, MessageKind.ANSWER, 0, 0, 0, came))
    [answer] = one.contribute(0, 0, own.view(torch.uint8).numpy().view(numpy_type))
    assert answer.array is not None
    assert answer.array.dtype == numpy_type
    assert torch.from_numpy(answer.array).view(dtype).tolist() == [3.75] * 3


def test_results_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    one = alone(1)
    for step in range(2 * MAX_RESULT_HISTORY_STEPS):
        one.arrive(incoming(0, MessageKind.RESULT, 1.0, step=step))
    assert list(one.finished) == list(range(MAX_RESULT_HISTORY_STEPS, 2 * MAX_RESULT_HISTORY_STEPS))
    monkeypatch.setattr(tree_node, "RESULT_HISTORY_BYTES", 24 * 5)
    few = alone(1)
    for step in range(10):
        few.arrive(incoming(0, MessageKind.RESULT, 1.0, step=step))
    assert list(few.finished) == list(range(5, 10))


def test_who_is_missing() -> None:
    """The root's own worker, too, until it and those below it have come. Not the replicas of who
    has."""
    root = alone(0)
    assert root.missing(0) == []
    root.arrive(incoming(2, MessageKind.ANSWER, 10.0))
    assert root.missing(0) == [0, 1]
    large = SimulatedTree(TWENTY, tree_schedule(TWENTY, 3)).nodes[0]
    large.contribute(0, 0, np.ones(3))
    assert large.missing(0) == [0, 1, 2, 3]
    for child in TWENTY.tree.children[0]:
        large.arrive(incoming(child, MessageKind.ANSWER, 1.0))
    assert large.missing(0) == [2, 3]
    large.arrive(incoming(3, MessageKind.ANSWER, 1.0))
    assert large.missing(0) == []
    star = planted("fractional", 4, 4, 1)
    host = SimulatedTree(star, tree_schedule(star, 3)).nodes[0]
    host.arrive(incoming(3, MessageKind.ANSWER, 1.0))
    assert host.missing(0) == [0, 1]


# Beyond what the code can do without


def settled(
    allocation: Allocation, present: set[int], cut: Collection[tuple[int, int]] = ()
) -> tuple[float, int] | None:
    """What all ranks get in the end if only some contribute, and how many cells it covers; every
    cell is worth another power of ten."""
    cells = np.array([[10.0**cell] for cell in range(allocation.cells)])
    inputs = contributions(allocation, cells)
    simulated = SimulatedTree(allocation, tree_schedule(allocation, 1))
    host = allocation.host
    root = simulated.nodes[host]
    simulated.step = 0
    simulated.deliver([(rank, 0) for rank in sorted(present)], inputs, cut=cut)
    assert not any(one.finished for one in simulated.nodes.values())
    for work in (root.request_partial, root.finish_partial):
        sent = work(0)
        if sent is None:
            return None
        simulated.deliver(
            [(message.peer, message._replace(peer=host)) for message in sent], inputs, cut=cut
        )
    [found] = {
        (float(one.finished[0].arrays[0][0]), one.finished[0].covered)
        for one in simulated.nodes.values()
    }
    return found


def test_a_hurry_goes_down_and_what_is_there_comes_up() -> None:
    one = alone(1)
    one.contribute(0, 0, np.full(3, 1.0))
    sent = one.arrive(BestEffortMessage(0, MessageKind.REQUEST_PARTIAL, 0))
    assert outline(sent) == [
        (4, "REQUEST_PARTIAL", 0, 0),
        (5, "REQUEST_PARTIAL", 0, 0),
        (0, "PARTIAL", 0, 0),
    ]
    assert sent[-1].covered == 1
    assert one.arrive(BestEffortMessage(0, MessageKind.REQUEST_PARTIAL, 0)) == []  # once
    [answer] = one.arrive(incoming(4, MessageKind.ANSWER, 10.0))  # it has all now
    assert outline([answer]) == [(0, "ANSWER", 0, 0)]
    leaf = alone(4)
    assert leaf.arrive(BestEffortMessage(1, MessageKind.REQUEST_PARTIAL, 0)) == []
    assert outline(leaf.contribute(0, 0, np.ones(3))) == [(1, "ANSWER", 0, 0)]


def test_what_is_there_is_scaled_up_and_says_so() -> None:
    """The workers of the first layer, and nobody below them: two cells of six."""
    assert TWENTY.cells == 6
    first = TWENTY.weights[0].keys() | TWENTY.weights[2].keys()
    total = sum(10.0**cell for cell in first)
    assert settled(TWENTY, {0, 1, 2, 3}) == (total * 6 / 2, 2)


def test_what_the_root_has_decoded_of_its_own_subtree_counts_in_full() -> None:
    """Worker 0 and all below it: three cells of six."""
    below = set(TWENTY.tree.children[0])
    covered = {cell for worker in {0, *below} for cell in TWENTY.weights[worker]}
    total = sum(10.0**cell for cell in covered)
    assert settled(TWENTY, {0, *below}) == (total * 6 / 3, 3)


def test_what_a_late_worker_has_from_below_is_part_of_it() -> None:
    below = TWENTY.tree.children[3]
    [cell] = TWENTY.weights[below[-1]]
    assert settled(TWENTY, {below[-1]}) == (10.0**cell * 6, 1)


def test_the_best_of_a_team_is_taken() -> None:
    """One of two replicas has a cell more than the other."""
    below = TWENTY.tree.children[3]
    cells = [*TWENTY.weights[2], *TWENTY.weights[below[0]]]
    total = sum(10.0**cell for cell in cells)
    assert settled(TWENTY, {2, 3, below[0]}) == (total * 6 / 2, 2)


def test_nothing_at_all_is_not_scaled_up() -> None:
    assert settled(TWENTY, set()) is None


def test_parts_of_two_replicas_are_not_put_together() -> None:
    """Each of a team lacks another cell, and sums can't be taken apart: one of them is taken."""
    left, right = TWENTY.tree.children[2], TWENTY.tree.children[3]
    present = {0, 1, 2, 3, *TWENTY.tree.children[0], left[0], right[-1]}
    found = settled(TWENTY, present)
    assert found is not None
    total, covered = found
    assert covered == 5
    one = next(iter(TWENTY.weights[left[0]]))
    other = next(iter(TWENTY.weights[right[-1]]))
    whole = sum(10.0**cell for cell in range(6))
    lacking = [(whole - 10.0**cell) * 6 / 5 for cell in (one, other)]
    assert any(total == pytest.approx(value, rel=1e-12) for value in lacking)


def test_an_exact_step_after_one_in_part() -> None:
    simulated = SimulatedTree(SMALL, tree_schedule(SMALL, 1))
    inputs = {worker: np.ones(1) for worker in SMALL.workers}
    simulated.step = 0
    simulated.deliver([(0, 0), (1, 0)], inputs)
    root = simulated.nodes[0]
    for work in (root.request_partial, root.finish_partial):
        sent = work(0)
        assert sent is not None
        simulated.deliver([(message.peer, message._replace(peer=0)) for message in sent], inputs)
    assert {one.finished[0].covered for one in simulated.nodes.values()} == {1}
    for results in simulated.run(inputs, late=(0, 4)).values():
        assert results is not None
        assert (results.arrays[0].tolist(), results.covered) == ([2.0], 0)

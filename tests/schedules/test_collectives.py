"""The collectives that all-reduces are made of."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clusters import groups
from tests.examples import examples
from tests.running import TIMEOUT, execute, run
from tests.threads import run_threads
from thalweg.engine.execute import RankProgram
from thalweg.errors import LayoutError
from thalweg.facts import Cluster
from thalweg.schedules import (
    Group,
    Schedule,
    all_gather,
    all_to_all,
    broadcast,
    check,
    reduce,
)
from thalweg.transports import Array, Transport

SOME = st.integers(0, 120)


def own_vectors(schedule: Schedule) -> dict[int, Array]:
    return {
        rank: np.arange(schedule.elements) + 1000.0 * (position + 1)
        for position, rank in enumerate(schedule.ranks)
    }


def block_bounds(group: Group, elements: int) -> list[tuple[int, int]]:
    """Where each member's block lies, in the group's order: near-equal, larger ones first."""
    bounds = [0]
    for index in range(group.size):
        bounds.append(bounds[-1] + elements // group.size + (index < elements % group.size))
    return list(pairwise(bounds))


@examples(40)
@given(group=groups(), elements=SOME, data=st.data())
def test_reduce_and_broadcast(group: Group, elements: int, data: st.DataObject) -> None:
    root = data.draw(st.sampled_from(group.ranks))
    for schedule, pick in (
        (reduce(group, elements, 4, root), "sum"),
        (broadcast(group, elements, 4, root), "root"),
    ):
        check(schedule)
        inputs = own_vectors(schedule)
        results = run(schedule, inputs)
        if pick == "sum":
            np.testing.assert_array_equal(results[root], np.sum(list(inputs.values()), axis=0))
        else:
            assert all(np.array_equal(result, inputs[root]) for result in results.values())


@examples(40)
@given(group=groups(), elements=SOME)
def test_all_gather(group: Group, elements: int) -> None:
    schedule = all_gather(group, elements, 4)
    check(schedule)
    inputs = own_vectors(schedule)
    gathered = run(schedule, inputs)
    for owner, (low, high) in zip(group.order, block_bounds(group, elements), strict=True):
        for rank in group.ranks:
            np.testing.assert_array_equal(gathered[rank][low:high], inputs[owner][low:high])


@examples(40)
@given(group=groups(most=17), elements=SOME)
def test_all_to_all(group: Group, elements: int) -> None:
    schedule = all_to_all(group, elements, 4)
    check(schedule)
    order, bounds = group.order, block_bounds(group, elements)
    inputs = {rank: np.arange(elements) + 1000.0 * (rank + 1) for rank in order}

    def work(transport: Transport) -> Array:
        """Blocks for others lie in the input, blocks from others in the output."""
        me = order.index(transport.rank)
        outgoing, incoming = inputs[transport.rank].copy(), np.zeros(group.size * (elements or 1))

        def view(start: int, stop: int) -> Array:
            source, target = divmod(start, group.size)
            assert stop == start + 1
            if source == me:
                return outgoing[slice(*bounds[target])]
            low, high = bounds[me]
            return incoming[source * elements :][: high - low]

        execute(RankProgram.of(schedule, transport.rank), transport, view, timeout=TIMEOUT)
        return incoming

    results = run_threads(group.ranks, work)
    for me, rank in enumerate(order):
        low, high = bounds[me]
        for position, source in enumerate(order):
            if source != rank:
                block = results[rank][position * elements :][: high - low]
                np.testing.assert_array_equal(block, inputs[source][low:high])


def test_a_root_outside_the_group_is_refused() -> None:
    group = Group((0, 2), Cluster.flat(3))
    with pytest.raises(LayoutError, match=r"root 1 is not in the group; choose one of \(0, 2\)"):
        reduce(group, 10, 4, root=1)

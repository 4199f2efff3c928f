from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from tests.examples import examples
from thalweg.errors import RunError
from thalweg.launch.launcher_variables import read_rank_assignment
from thalweg.launch.store import open_store
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.members.agreement import SEAL_HISTORY_COUNT, Agreement, Change

PERIOD = 4
FAR = SEAL_HISTORY_COUNT * PERIOD  # steps


class Watched:
    """A store seen through `before`, which is called ahead of every operation."""

    def __init__(self, store: Any, before: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.store = store
        self.before = before

    def __getattr__(self, name: str) -> Any:
        if name == "clone":  # the clone wouldn't be watched
            raise AttributeError(name)
        operation = getattr(self.store, name)
        if not callable(operation):
            return operation

        def call(*arguments: Any) -> Any:
            self.before(name, arguments)
            return operation(*arguments)

        return call


def assert_agreed(seen: list[list[Change]], proposed: list[Any]) -> None:
    """The same changes at the same steps on all ranks, and each proposal once."""
    assert all(changes == seen[0] for changes in seen)
    assert all(change.step % PERIOD == 0 for change in seen[0])
    key = str
    assert sorted((c.value for c in seen[0]), key=key) == sorted(proposed, key=key)


@examples(40)
@given(
    size=st.integers(1, 4),
    start=st.integers(0, 9),
    turns=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 1, 1, FAR, 2 * FAR])), max_size=30
    ),
)
@example(size=2, start=0, turns=[(1, 2 * FAR), (0, 4 * FAR), (0, 0), (0, FAR)])
def test_any_order_of_ranks(size: int, start: int, turns: list[tuple[int, int]]) -> None:
    """A turn is a rank that goes so many steps ahead, however far the others are behind, or that
    proposes. Ranks may be further apart than the seals that are kept for those who restart."""
    store = dist.HashStore()
    ranks = [Agreement(store, rank=rank, size=size, period=PERIOD) for rank in range(size)]
    steps = [start] * size
    seen: list[list[Change]] = [[] for _ in ranks]
    proposed = []

    def advance(rank: int, last: int) -> None:
        for step in range(steps[rank], last):
            seen[rank] += ranks[rank].take_effect(step)
        steps[rank] = max(steps[rank], last)

    for number, (rank, ahead) in enumerate(turns):
        if ahead == 0:
            ranks[rank % size].propose("x", number)
            proposed.append(number)
        else:
            advance(rank % size, steps[rank % size] + ahead)
    end = max(steps) + PERIOD + 1
    for rank in range(size):
        advance(rank, end)
    assert_agreed(seen, proposed)
    assert [change.value for change in seen[0]] == proposed
    # the log, where each rank is, and the seals since all looked for old ones
    assert store.num_keys() <= 1 + size + 2 * SEAL_HISTORY_COUNT


def train(
    store: Any, rank: int, size: int, seed: int, all_have_proposed: Callable[[], Any]
) -> tuple[list[Change], list[str]]:
    """What a rank saw and proposed in 40 steps, and at one more safe point after all proposals."""
    rng = random.Random(100 * seed + rank)
    lag = rng.choice([0.0, 0.0001, 0.001])
    watched = Watched(store, lambda *_: time.sleep(lag * rng.random()))
    agreement = Agreement(watched, rank=rank, size=size, period=PERIOD)
    seen: list[Change] = []
    proposed: list[str] = []
    for step in range(40):
        if rng.random() < 0.2:
            proposed.append("the same" if seed % 2 else f"{rank}, {step}")
            agreement.propose("x", proposed[-1])
        seen += agreement.take_effect(step)
    all_have_proposed()
    return seen + agreement.take_effect(40), proposed


@pytest.mark.parametrize("seed", range(12))
def test_threads_with_lags_between_any_two_operations(seed: int) -> None:
    size = 8
    store = dist.HashStore()
    barrier = threading.Barrier(size, timeout=60)
    with ThreadPoolExecutor(size) as pool:
        results = list(
            pool.map(lambda rank: train(store, rank, size, seed, barrier.wait), range(size))
        )
    assert_agreed([seen for seen, _ in results], [one for _, some in results for one in some])
    assert store.num_keys() == 1 + 40 // PERIOD + 1  # the log, and a seal for each safe point


def test_processes_on_a_tcp_store() -> None:
    size = 3

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        store = open_store(read_rank_assignment(os.environ), timeout=60)

        def meet(where: str) -> None:
            store.set(f"{where}/{rank}", "")
            store.wait([f"{where}/{other}" for other in range(size)], timedelta(seconds=60))

        run = dist.PrefixStore("run", store)
        seen, proposed = train(run, rank, size, 0, lambda: meet("proposed"))
        meet("done")
        keys = [key for key in store.list_keys() if "agreement" in key]
        return {"seen": [asdict(change) for change in seen], "proposed": proposed, "keys": keys}

    found = run_workers(size, work, timeout=60, debug=True)
    assert_agreed(
        [[Change(**change) for change in result["seen"]] for result in found],
        [one for result in found for one in result["proposed"]],
    )
    for result in found:
        assert any(key.endswith("run/agreement/log") for key in result["keys"])
        assert len(result["keys"]) == 1 + 40 // PERIOD + 1


def test_equal_proposals_at_the_same_moment_are_two() -> None:
    """The second reads the log; then comes the first; and the store has what the second wants."""
    store = dist.HashStore()
    first = Agreement(store, rank=0, size=1, period=1)
    interruptions = [lambda: first.propose("x", 1)]

    def before(operation: str, arguments: tuple[Any, ...]) -> None:
        if operation == "compare_set" and arguments[1] and interruptions:
            interruptions.pop()()

    Agreement(Watched(store, before), rank=0, size=1, period=1).propose("x", 1)
    assert not interruptions
    assert first.take_effect(0) == [Change(name="x", value=1, step=0)] * 2


def test_what_comes_after_the_seal_waits_for_the_next() -> None:
    store = dist.HashStore()
    fast, slow = (Agreement(store, rank=rank, size=2, period=8) for rank in (0, 1))
    fast.propose("plan", "ring")
    assert fast.take_effect(8) == [Change(name="plan", value="ring", step=8)]
    fast.propose("plan", "star")
    assert slow.take_effect(8) == [Change(name="plan", value="ring", step=8)]
    assert (
        slow.take_effect(16) == fast.take_effect(16) == [Change(name="plan", value="star", step=16)]
    )
    assert slow.take_effect(24) == fast.take_effect(24) == []


def test_values_are_the_same_on_the_rank_that_proposed_them() -> None:
    agreement = Agreement(dist.HashStore(), rank=0, size=1, period=1)
    value = {"group": [[0, 1], [2]], "é\0": None, "rate": 0.1, "off": False}
    agreement.propose("x", value)
    value["rate"] = 0.2
    assert agreement.take_effect(0)[0].value == value | {"rate": 0.1}
    with pytest.raises(TypeError):
        agreement.propose("x", object())  # no JSON
    assert agreement.take_effect(1) == []


def test_between_safe_points_the_store_is_left_alone() -> None:
    operations: list[str] = []
    watched = Watched(dist.HashStore(), lambda name, _: operations.append(name))
    agreement = Agreement(watched, rank=0, size=2, period=8)
    for step in (1, 2, 7, 9, 4001):
        assert agreement.take_effect(step) == []
    assert operations == []
    agreement.take_effect(4008)
    assert operations == ["compare_set", "compare_set"]
    agreement.take_effect(4008)
    assert len(operations) == 2


def test_the_store_does_not_grow() -> None:
    store = dist.HashStore()
    agreement = Agreement(store, rank=0, size=1, period=1)
    for step in range(3 * SEAL_HISTORY_COUNT + 1):
        agreement.propose("x", step)
        assert [change.value for change in agreement.take_effect(step)] == [step]
    start, proposals = json.loads(store.get("agreement/log"))
    assert (start, len(proposals)) == (2 * SEAL_HISTORY_COUNT, SEAL_HISTORY_COUNT + 1)
    assert (
        store.num_keys() == 2 + SEAL_HISTORY_COUNT + 1
    )  # the log, where the rank is, and the last seals


def test_no_seal_is_kept_for_those_who_go_on_from_the_state_of_others() -> None:
    """Under a plan that waits for nobody a member may be gone for good."""
    store = dist.HashStore()
    agreement = Agreement(store, rank=0, size=2, period=1, awaits=lambda: ())
    for step in range(3 * SEAL_HISTORY_COUNT + 1):
        agreement.take_effect(step)
    assert store.num_keys() == 2 + SEAL_HISTORY_COUNT + 1


def test_one_who_was_restarted_reads_the_same_again() -> None:
    """However often a seal is read, the next reader gets the same, and not what came since."""
    store = dist.HashStore()
    early, late = (Agreement(store, rank=rank, size=2, period=PERIOD) for rank in (0, 1))
    early.propose("x", "before")
    assert [change.value for change in early.take_effect(PERIOD)] == ["before"]
    again = Agreement(store, rank=0, size=2, period=PERIOD)
    assert [change.value for change in again.take_effect(PERIOD)] == ["before"]
    again.propose("x", "after")
    assert [change.value for change in late.take_effect(PERIOD)] == ["before"]


def test_a_store_that_is_gone() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", master.port, timeout=timedelta(seconds=60))
    agreement = Agreement(client, rank=3, size=4, period=1)
    agreement.take_effect(0)
    del master
    for action in (lambda: agreement.take_effect(1), lambda: agreement.propose("x", 1)):
        with pytest.raises(RunError, match=r"^rank 3 can't reach the store: [^\n]*; look whether"):
            action()


@pytest.mark.parametrize(("rank", "size", "period"), [(2, 2, 1), (-1, 2, 1), (0, 1, 0)])
def test_nonsense(rank: int, size: int, period: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {size} with a period of {period} steps"):
        Agreement(dist.HashStore(), rank=rank, size=size, period=period)

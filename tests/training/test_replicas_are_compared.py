"""Replicas that are to be equal are compared while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.training.workers import TIMEOUT, on_ranks, raised
from thalweg.engine.digest import digest
from thalweg.observe.monitor import REPLICA_CHECK_PERIOD_STEPS as EVERY
from thalweg.observe.monitor import difference
from thalweg.training import attach

LONG = 100_000  # steps, far more than it takes
FLIPPED = EVERY + 6  # the step before which a bit is flipped


def flip_a_bit(parameter: torch.Tensor) -> None:
    """The lowest of one element."""
    with torch.no_grad():
        parameter.view(-1).view(torch.int32)[5] ^= 1


def until_it_ends(
    sync: str, wrong: int | None, steps: int = LONG, together: Callable[[], Any] = lambda: None
) -> None:
    """`together` is called before each step, and waits for the others where no plan does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    sgd = torch.optim.SGD(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(24, 40))
    run = attach(model, sgd, plan=sync, data=data, batch=12, timeout=TIMEOUT)
    for epoch in run.epochs(steps // 2):
        for [x] in run.batches(epoch):
            if run.rank == wrong and run.step == FLIPPED:
                flip_a_bit(model[0].weight)
            together()
            sgd.zero_grad()
            run.mean(model(x).square().mean(dim=1)).backward()
            sgd.step()
    if "gc" not in sync:
        assert run.report(drift=True).drift == 0
    run.close()


@pytest.mark.parametrize("sync", ["ring", "ddp", "gc(stragglers=1)", "ring+powersgd"])
def test_one_that_differs_is_named_on_all_ranks(sync: str) -> None:
    """Under a code one that is late may take another's state, right or wrong: here nobody is."""
    barrier = get_context("fork").Barrier(3, timeout=30.0)

    def work(rank: int) -> dict[str, Any]:
        return raised(lambda: until_it_ends(sync, wrong=1, together=barrier.wait))

    for result in on_ranks(3, work):
        assert result["kind"] == "Mismatch"
        assert "the parameters of rank 1 differ from the others'" in result["text"]
        assert "ATEN_CPU_CAPABILITY" in result["text"]


def test_of_two_nobody_knows_which_is_right() -> None:
    for result in on_ranks(2, lambda rank: raised(lambda: until_it_ends("ring", wrong=1))):
        assert "the parameters of ranks 0, 1 differ after step" in result["text"]


def test_healthy_replicas_are_left_alone() -> None:
    plans = ["ring", "ddp", "gc(stragglers=1)", "ring+powersgd"]

    def work(rank: int) -> dict[str, Any]:
        return {sync: raised(lambda s=sync: until_it_ends(s, None, 3 * EVERY)) for sync in plans}

    for result in on_ranks(3, work):
        assert [sync for sync in plans if result[sync]["text"]] == []


@pytest.mark.parametrize("sync", ["ring", "ddp", "ring+int8"])
def test_drift_looks_at_replicas_under_every_plan(sync: str) -> None:
    """One element that is 3 off on one of three ranks: the distances are 2, 1 and 1."""

    def work(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(torch.bfloat16)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        data = TensorDataset(torch.ones(6, 4))
        run = attach(model, sgd, plan=sync, data=data, batch=3, timeout=TIMEOUT)
        before = run.report(drift=True).drift
        with torch.no_grad():
            model.weight[1, 1] = 4.0 if rank == 1 else 1.0
        after = run.report(drift=True).drift
        run.close()
        return {"before": before, "after": after}

    for result in on_ranks(3, work):
        assert result["before"] == 0
        assert result["after"] == pytest.approx(sqrt((4 + 1 + 1) / 3))


def test_drift_is_refused_where_nobody_waits() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = nn.Linear(4, 4)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        data = TensorDataset(torch.ones(6, 4))
        run = attach(model, sgd, plan="gc(stragglers=1)", data=data, batch=3, timeout=TIMEOUT)
        return raised(lambda: run.report(drift=True))

    for result in on_ranks(3, work):
        assert "switch to ring before" in result["text"]


def test_every_bit_counts_and_so_does_its_place() -> None:
    given = [torch.randn(1000), torch.randn(7, 9, dtype=torch.float64), torch.randn(3).bfloat16()]
    plain = digest(given)
    assert plain == digest([tensor.clone() for tensor in given])
    for tensor in given:
        raw = tensor.view(-1).view(torch.uint8)
        for place in range(0, len(raw), 13):
            for bit in range(8):
                raw[place] ^= 1 << bit
                assert digest(given) != plain
                raw[place] ^= 1 << bit
    assert digest(given) == plain
    assert digest([given[0].roll(1), *given[1:]]) != plain
    assert digest(given[::-1]) != plain
    assert digest([torch.zeros(3), torch.ones(0)]) != digest([torch.ones(3), torch.ones(0)])
    one, two, three = (digest([torch.tensor(number)]) for number in (1, 2, 3))
    assert one + three != 2 * two  # so that a sum of all ranks' digests tells whether all are equal


def test_steps_are_judged_when_all_have_reported() -> None:
    assert difference({}, 3) == ""
    assert difference({0: {64: 7}, 1: {64: 8}}, 3) == ""  # rank 2 will decide
    assert "rank 1 differ" in difference({0: {64: 7}, 1: {64: 8}, 2: {64: 7}}, 3)
    assert "ranks 0, 1 differ" in difference({0: {64: 7}, 1: {64: 8}}, 2)
    assert "ranks 0, 1, 2 differ" in difference({0: {64: 7}, 1: {64: 8}, 2: {64: 9}}, 3)
    assert difference({0: {64: 7, 128: 5}, 1: {64: 7}, 2: {128: 5}}, 3) == ""
    late = {0: {64: 7, 192: 1}, 1: {64: 8, 192: 2}, 2: {0: 1}}
    assert difference(late, 3) == ""
    late[2] = {128: 7}  # it took another's state meanwhile
    assert "ranks 0, 1 differ after step 64" in difference(late, 3)

"""`run.mean`: what it returns, what its gradient is, and that nothing is learnt without it where
that would be wrong. One crew of processes for all plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.training.workers import TIMEOUT, fingerprint, on_ranks, one_value, raised, values
from thalweg.errors import UsageError
from thalweg.training import Run, attach

SIZE, SAMPLES, BATCH = 4, 48, 12
ALL_ARE_THROUGH = get_context("fork").Barrier(SIZE)
CODE, ALL = "gc(stragglers=1)", ("ring", "gc(stragglers=1)", "lgc", "local_sgd(every=2)")
DATA = TensorDataset(
    torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
)


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    return model, torch.optim.SGD(model.parameters(), 0.1)


def each(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One loss a sample."""
    losses: torch.Tensor = model(x).squeeze(1).square()
    return losses


def decay(model: nn.Module) -> torch.Tensor:
    """A term that isn't of any sample."""
    return 0.05 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


Loss = Callable[[Run, nn.Module, torch.Tensor], torch.Tensor]


def trained(
    sync: str, loss: Loss, *, batch: int = BATCH, at: str = "", samples: int = SAMPLES
) -> dict[str, Any]:
    """An epoch, or what it ends in; `at` names a plan to switch to after the first step."""
    model, optimizer = net()
    data = TensorDataset(DATA.tensors[0][:samples])
    run = attach(model, optimizer, plan=sync, data=data, batch=batch, timeout=TIMEOUT)
    said, expected, held = [], [], ""

    def train() -> None:
        nonlocal held
        for epoch in run.epochs(40 if at else 1):
            for (x,) in run.batches(epoch):
                held = fingerprint(model)
                optimizer.zero_grad()
                value = loss(run, model, x)
                said.append(value.item())
                expected.append((each(model, x).mean() + decay(model)).item())
                value.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if at and run.rank == 1 and run.step == 1:
                    run.switch(at)

    error = raised(train)
    result = {"step": run.step, "sync": str(run.plan), "untouched": fingerprint(model) == held}
    ALL_ARE_THROUGH.wait(60)  # or one whose others have ended says so instead of its own error
    run.close()
    return {**error, **result, "said": said, "expected": expected, "values": values(model)}


def weighed(run: Run, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return run.mean(each(model, x) + decay(model))


def plain(run: Run, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return each(model, x).mean() + decay(model)


def logged(run: Run, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A mean that no backward goes through."""
    run.mean(each(model, x))
    return plain(run, model, x)


def second(run: Run, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A backward of another loss, after one of a mean that was weighed."""
    with run.no_sync():
        run.mean(each(model, x)).backward()  # type: ignore[no-untyped-call]
    return plain(run, model, x)


def in_two(run: Run, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Two losses of a batch, and an evaluation of other samples in between."""
    first = run.mean(0.25 * each(model, x))
    with torch.no_grad():
        model.eval()
        whole = run.mean(each(model, DATA.tensors[0]))
        model.train()
    assert whole.item() == pytest.approx(each(model, DATA.tensors[0]).mean().item(), rel=1e-12)
    return first + run.mean(0.75 * each(model, x) + decay(model))


def alone(batch: int = BATCH) -> list[float]:
    """The same epoch on one process, which has every batch whole."""
    model, optimizer = net()
    run = attach(model, optimizer, plan="ring", data=DATA, batch=batch)
    for (x,) in run.batches(0):
        optimizer.zero_grad()
        torch.autograd.backward(each(model, x).mean() + decay(model))
        optimizer.step()
    run.close()
    return values(model)


@cache
def crew() -> dict[str, list[dict[str, Any]]]:
    """What each case came to, on every rank."""
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        **{f"weighed {sync}": lambda sync=sync: trained(sync, weighed) for sync in ALL},  # type: ignore[misc]
        "in two": lambda: trained(CODE, in_two),
        "weighed, uneven": lambda: trained("ring", weighed, batch=10),
        "plain, even": lambda: trained("ring", plain),
        "plain, code": lambda: trained(CODE, plain),
        "logged, code": lambda: trained(CODE, logged),
        "second, code": lambda: trained(CODE, second),
        "plain, late": lambda: trained("lgc", plain),
        "plain, uneven": lambda: trained("ring", plain, batch=10),
        "plain, uneven, parameters": lambda: trained("local_sgd(every=2)", plain, batch=10),
        "plain, uneven at the end": lambda: trained("ring", plain, samples=46),
        "plain, switched": lambda: trained("ring", plain, at=CODE),
    }
    results = on_ranks(SIZE, lambda rank: {name: case() for name, case in cases.items()})
    return {name: [result[name] for result in results] for name in cases}


@pytest.mark.parametrize("sync", ALL)
def test_its_value_is_the_plain_mean(sync: str) -> None:
    for result in crew()[f"weighed {sync}"]:
        assert not result["text"]
        assert result["step"] == SAMPLES // BATCH
        assert result["said"] == pytest.approx(result["expected"], rel=1e-12)


@pytest.mark.parametrize("case", [f"weighed {CODE}", "weighed ring", "in two", "plain, even"])
def test_terms_of_no_sample_count_once(case: str) -> None:
    """As in one process that has the whole batch."""
    assert one_value(crew()[case], "values") == pytest.approx(alone(), abs=1e-12)


def test_unlike_shares_make_the_mean_over_the_batch() -> None:
    assert one_value(crew()["weighed, uneven"], "values") == pytest.approx(alone(10), abs=1e-12)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("plain, code", "the plan gives samples different weights"),
        ("logged, code", "the plan gives samples different weights"),
        ("second, code", "the plan gives samples different weights"),
        ("plain, late", "the plan gives samples different weights"),
        ("plain, uneven", "10 samples don't divide evenly by 4 workers"),
        ("plain, uneven, parameters", "10 samples don't divide evenly by 4 workers"),
        ("plain, uneven at the end", "10 samples don't divide evenly by 4 workers"),  # 3 * 12 + 10
    ],
)
def test_nothing_is_learnt_from_a_loss_that_it_has_not_weighed(case: str, why: str) -> None:
    for result in crew()[case]:
        assert result["kind"] == "RunError"
        assert "run.mean hasn't weighed" in result["text"]
        assert why in result["text"]
        assert (result["step"], result["untouched"]) == (0, True)


def test_nor_when_such_a_plan_is_taken_up_later() -> None:
    """On every rank, at the first step of it."""
    results = crew()["plain, switched"]
    assert one_value(results, "sync") == CODE
    assert one_value(results, "step") % 8 == 0  # a safe point
    assert one_value(results, "kind") == "RunError"
    assert all(result["untouched"] for result in results)


def test_losses_of_tokens() -> None:
    model, optimizer = net()
    run = attach(model, optimizer, plan="ring", data=DATA, batch=6)
    for _ in run.batches(0):
        with pytest.raises(UsageError, match="average over tokens or pixels first, and give it o"):
            run.mean(torch.ones(6, 7))
        with pytest.raises(
            UsageError, match=r"run\.mean got \[5\] losses for 6 samples; give it one"
        ):
            run.mean(torch.ones(5))
        break
    run.close()


def test_batches_without_backward_and_those_that_add_up() -> None:
    def work(rank: int) -> dict[str, Any]:
        model, optimizer = net()
        run = attach(model, optimizer, plan="ring", data=DATA, batch=11, timeout=TIMEOUT)
        for number, (x,) in enumerate(run.batches(0)):
            if number == 0:
                continue
            if number == 1:
                with run.no_sync():
                    run.mean(each(model, x)).backward()
                continue
            if number == 2:
                run.mean(each(model, x)).backward()
                optimizer.step()
                optimizer.zero_grad()
                continue
            with run.no_sync():
                error = raised(lambda x=x: each(model, x).mean().backward())  # type: ignore[misc]
        run.close()
        return {**error, "step": run.step}

    for result in on_ranks(2, work):
        assert result["step"] == 1
        assert "run.mean hasn't weighed" in result["text"]


def test_close_after_a_meeting_that_ended_in_an_error() -> None:
    """The tree is closed by then, and nobody can be given anything."""

    def work(rank: int) -> dict[str, Any]:
        model, optimizer = net()
        run = attach(model, optimizer, plan=CODE, data=DATA, batch=12)
        assert run._session.source is not None
        run._session.source.abort()
        run.close()
        return {}

    on_ranks(2, work)

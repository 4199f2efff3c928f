"""An optimizer that the script makes after attach(), as trainers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.training.workers import TIMEOUT, apart, fingerprint, on_ranks, raised, same_bits
from thalweg.errors import RunError, UsageError
from thalweg.training import Run, attach

DATA = TensorDataset(torch.arange(24.0).reshape(24, 1), torch.arange(24.0))


def sgd(model: nn.Module, lr: float = 0.001) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.5)


def train(model: nn.Module, run: Run, epochs: int = 1) -> None:
    for epoch in run.epochs(epochs):
        for x, y in run.batches(epoch):
            run.optimizer.zero_grad()
            run.mean((model(x).squeeze(1) - y).square()).backward()
            run.optimizer.step()


@pytest.mark.parametrize("sync", ["ring", "local_sgd(every=2)"])
def test_trains_as_with_one_from_the_beginning(sync: str, tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        models = []
        for late in (False, True):
            torch.manual_seed(rank)
            model = nn.Linear(1, 1)
            given = {} if late else {"optimizer": sgd(model)}
            run = attach(model, **given, plan=sync, data=DATA, batch=6, timeout=TIMEOUT)
            if late:
                run.optimizer = sgd(model)
            train(model, run)
            run.save(tmp_path / str(late))
            with run.consensus():
                models.append((run.step, fingerprint(model)))
            run.close()
        return {"same": models[0] == models[1], "print": models[0][1]}

    results = on_ranks(2, work)
    assert all(result["same"] for result in results)
    assert same_bits(results)


def test_the_server_of_asp_steps_with_it() -> None:
    """It copies the optimizer when the run begins."""

    def work(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank)
        model = nn.Linear(1, 1)
        with attach(model, plan="asp", data=DATA, batch=6, timeout=TIMEOUT) as run:
            run.optimizer = sgd(model)
            before = fingerprint(model)
            train(model, run)
        return {"step": run.step, "moved": fingerprint(model) != before}

    for result in on_ranks(2, work):
        assert result == {"step": 4, "moved": True}


def test_resumes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    with attach(model, sgd(model), plan="ring", data=DATA, batch=6, resume=tmp_path) as run:
        train(model, run)
        run.save(tmp_path)
    again = nn.Linear(1, 1)
    with attach(again, plan="ring", data=DATA, batch=6, resume=tmp_path) as run:
        run.optimizer = sgd(again)
        assert run.step == 4
        assert apart(model, again) == 0


def test_what_needs_it_says_so_in_one_line() -> None:
    model = nn.Linear(1, 1)
    run = attach(model, plan="ring", data=DATA, batch=6)
    for needs_it in (
        lambda: model(torch.ones(1, 1)),
        lambda: next(iter(run.batches(0))),
        lambda: run.save("nowhere"),
        lambda: run.consensus().__enter__(),
        lambda: run.no_sync().__enter__(),
        lambda: run.optimizer,
    ):
        with pytest.raises(UsageError, match=r"no optimizer yet; set run\.optimizer before"):
            needs_it()
    with torch.no_grad():
        model(torch.ones(1, 1))
    run.close()
    with pytest.raises(RunError, match="the run is closed"):
        run.optimizer = sgd(model)
    model(torch.ones(1, 1)).sum().backward()


def test_is_set_once() -> None:
    model = nn.Linear(1, 1)
    with attach(model, plan="ring") as run:
        run.optimizer = optimizer = sgd(model)
        with pytest.raises(UsageError, match="the run has an optimizer already"):
            run.optimizer = sgd(model)
        assert run.optimizer is optimizer


def test_one_of_another_model_is_refused() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    with attach(model, plan="ring") as run:
        with pytest.raises(UsageError, match="the optimizer has parameters that are not"):
            run.optimizer = sgd(other)
        run.optimizer = sgd(model)


def test_ranks_whose_optimizers_differ_all_refuse() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = nn.Linear(1, 1)
        run = attach(model, plan="ring", timeout=TIMEOUT)

        def begin() -> None:
            run.optimizer = sgd(model, lr=0.1 * (1 + rank))

        result = raised(begin)
        run.close()
        return result

    for result in on_ranks(2, work):
        assert result["kind"] == "Mismatch"
        assert "optimizer: group 0, lr is 0.2, on rank 0 0.1" in result["text"]

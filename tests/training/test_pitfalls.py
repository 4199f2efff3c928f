"""What users of DDP do, and what must not end in replicas that differ without a word."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.training.workers import TIMEOUT, fingerprint, on_ranks, one_value, raised, same_bits
from thalweg.errors import RunError
from thalweg.training import Run, attach

DATA = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))


def line() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    run.mean(model(x)[:, 0].square()).backward()
    optimizer.step()


def test_a_forward_with_gradients_inside_consensus_is_no_safe_point() -> None:
    def work(rank: int) -> dict[str, Any]:
        model, optimizer = line()
        sync = "local_sgd(every=3)"
        run = attach(model, optimizer, plan=sync, data=DATA, batch=4, timeout=TIMEOUT)
        ends = []
        for epoch in run.epochs(3):  # 8 steps each: an epoch ends where changes are taken up
            for (x,) in run.batches(epoch):
                if run.step == 2 and rank == 0:
                    run.switch("ring")
                step(run, model, optimizer, x)
            with run.consensus():
                model(DATA.tensors[0])
            ends.append(str(run.plan))
        run.close()
        return {"ends": ends, "print": fingerprint(model)}

    results = on_ranks(2, work)
    assert one_value(results, "ends")[-1] == "ring"
    assert same_bits(results)


def test_several_steps_on_one_batch_keep_its_shares() -> None:
    """A change of plan waits for the next batch, whose shares it changes."""

    def work(rank: int) -> dict[str, Any]:
        model, _ = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        data = TensorDataset(torch.ones(64, 4))
        run = attach(model, optimizer, plan="ring", data=data, batch=4, timeout=TIMEOUT)
        if rank == 0:
            run.switch("gc(stragglers=1)")
        gradients = []
        for (x,) in run.batches(0):
            for _ in range(3 if str(run.plan) == "ring" else 1):
                optimizer.zero_grad()
                run.mean(model(x)[:, 0].square()).backward()
                assert model.weight.grad is not None
                gradients.append(float(model.weight.grad[0, 0]))
                optimizer.step()
        sync = str(run.plan)
        run.close()
        return {"gradients": gradients, "sync": sync}

    results = on_ranks(2, work)
    assert one_value(results, "sync") == "gc(stragglers=1)"
    gradients = one_value(results, "gradients")
    assert gradients == pytest.approx([gradients[0]] * len(gradients), rel=1e-5)


def test_several_steps_on_one_batch_are_refused_under_a_code() -> None:
    """Which batch a late worker is to go on with follows from the step."""

    def work(rank: int) -> dict[str, Any]:
        model, _ = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        data = TensorDataset(torch.ones(64, 4))
        run = attach(model, optimizer, plan="gc", data=data, batch=4, timeout=TIMEOUT)
        (x,) = next(run.batches(0))
        run.mean(model(x)[:, 0].square()).backward()
        optimizer.step()
        with pytest.raises(RunError, match="the optimizer steps twice on one batch"):
            run.mean(model(x)[:, 0].square()).backward()
        run.close()
        return {}

    on_ranks(2, work)


def test_consensus_on_one_rank_alone_changes_nothing_elsewhere() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = nn.Linear(4, 1)
        with torch.no_grad():
            model.weight.fill_(3.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        patience = "3s" if rank == 0 else TIMEOUT  # so that rank 0 is the first to give up
        run = attach(model, optimizer, plan="local_sgd(every=1)", timeout=patience)
        x = torch.ones(2, 4)
        step(run, model, optimizer, x)

        def go_on() -> None:
            if rank == 0:
                with run.consensus():
                    model(x)
            for _ in range(3):
                step(run, model, optimizer, x)

        error = raised(go_on)
        run.close()
        return {"weights": model.weight.flatten().tolist(), **error}

    alone, other = on_ranks(2, work)
    assert alone["weights"] == other["weights"] == [3.0] * 4
    assert "call run.consensus and run.save on every rank" in alone["text"]
    assert "rank 0 aborted: rank 0 timed out waiting for rank 1 (before step 1)" in other["text"]


def test_nothing_to_average_needs_nobody() -> None:
    """Exact plan, no statistics: consensus on one rank alone is harmless."""

    def work(rank: int) -> dict[str, Any]:
        model, optimizer = line()
        run = attach(model, optimizer, plan="ring", timeout=TIMEOUT)
        for number in range(4):
            step(run, model, optimizer, torch.full((2, 4), rank + 1.0))
            if rank == 0 and number == 1:
                with run.consensus():
                    model(torch.ones(2, 4))
        run.close()
        return {"print": fingerprint(model)}

    assert same_bits(on_ranks(2, work))


def test_a_code_refuses_to_add_up_twice() -> None:
    def work(rank: int) -> dict[str, Any]:
        model, optimizer = line()
        sync = "gc(stragglers=1)"
        run = attach(model, optimizer, plan=sync, data=DATA, batch=8, timeout=TIMEOUT)

        def twice() -> None:
            for (x,) in run.batches(0):
                run.mean(model(x)[:, 0].square()).backward()

        error = raised(twice)
        run.close()
        return error

    for result in on_ranks(2, work):
        assert "two backwards in one step" in result["text"]
        assert "run.no_sync()" in result["text"]


def test_what_nobody_would_average_is_refused() -> None:
    def unfrozen_later() -> None:
        model, optimizer = line()
        model.bias.requires_grad_(False)
        run = attach(model, optimizer, plan="ring")
        step(run, model, optimizer, torch.ones(2, 4))
        model.bias.requires_grad_(True)
        for _ in range(9):
            step(run, model, optimizer, torch.ones(2, 4))

    def a_stranger_in_the_optimizer() -> None:
        model, _ = line()
        scale = nn.Parameter(torch.ones(1))
        attach(model, torch.optim.SGD([*model.parameters(), scale], lr=0.1), plan="ring")

    assert "parameter bias was added or unfrozen" in raised(unfrozen_later)["text"]
    assert "not the model's" in raised(a_stranger_in_the_optimizer)["text"]


def test_ddp_says_if_the_model_is_not_called() -> None:
    class Own(nn.Linear):
        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight).square().mean()

    def work(rank: int) -> dict[str, Any]:
        model = Own(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = attach(model, optimizer, plan="ddp", timeout=TIMEOUT)

        def train() -> None:
            model.loss(torch.ones(2, 4)).backward()
            optimizer.step()

        before = fingerprint(model)
        error = raised(train)
        run.close()
        return {**error, "untouched": fingerprint(model) == before}

    for result in on_ranks(2, work):
        assert "the model wasn't called in this step" in result["text"]
        assert result["untouched"]  # by gradients that nobody averaged


def test_an_optimizer_round_another_is_unwrapped() -> None:
    """As trainers have them: of torch's class, but without its hooks."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optimizer.step(closure)

    class Forwarding:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.optimizer, name)

    class Own:
        param_groups = ()

    for wrap in (lambda inner: Wrapper(Wrapper(inner)), Forwarding):
        model, optimizer = line()
        wrapper: Any = wrap(optimizer)
        run = attach(model, wrapper, plan="ring")
        run.mean(model(torch.ones(2, 4))[:, 0].square()).backward()
        wrapper.step()
        assert run.step == 1
        run.close()
    own: Any = Own()
    for stranger in (own, Wrapper(own)):
        error = raised(partial(attach, model, stranger, plan="ring"))
        assert error["kind"] == "UsageError"
        assert f"{type(stranger).__name__} is not a torch optimizer" in error["text"]


def test_ones_own_loader_resumes_at_the_next_epoch(tmp_path: Path) -> None:
    seen = []
    for epochs in (2, 4):
        model, optimizer = line()
        run = attach(model, optimizer, plan="ring", resume=tmp_path)
        for epoch in run.epochs(epochs):
            seen.append(epoch)
            step(run, model, optimizer, torch.ones(2, 4))
            run.save(tmp_path)
        run.close()
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(("batch", "seed"), [(8, 0), (4, 1)])
def test_another_order_of_samples_is_not_gone_on_with(
    batch: int, seed: int, tmp_path: Path
) -> None:
    model, optimizer = line()
    run = attach(model, optimizer, plan="ring", data=DATA, batch=4)
    for (x,) in run.batches(0):
        step(run, model, optimizer, x)
        if run.step == 3:
            break
    run.save(tmp_path)
    run.close()
    model, optimizer = line()
    error = raised(
        lambda: attach(
            model, optimizer, plan="ring", data=DATA, batch=batch, seed=seed, resume=tmp_path
        )
    )
    assert error["kind"] == "CheckpointError"
    assert "was written with" in error["text"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"optimizer": 3}, "int is not a torch optimizer"),
        ({"timeout": "soon"}, "'soon' is not a duration"),
        ({"plan": "rinq"}, "there is no plan 'rinq'"),
        ({"sync": "rinq"}, "there is no plan 'rinq'"),
        ({"plan": "ring", "sync": "ring"}, "plan= and sync= are two names of one argument"),
    ],
)
def test_wrong_arguments_are_one_line(wrong: dict[str, Any], said: str) -> None:
    model, optimizer = line()
    arguments: dict[str, Any] = {"optimizer": optimizer, **wrong}
    assert said in raised(lambda: attach(model, **arguments))["text"]


def test_wrong_options_of_the_loader(tmp_path: Path) -> None:
    model, optimizer = line()
    run = attach(
        model, optimizer, plan="ring", data=DATA, batch=4, loader={"shuffle": True}, timeout=20
    )
    assert "loader= doesn't suit" in raised(lambda: next(run.batches(0)))["text"]
    run.close()


class Careful(torch.optim.SGD):
    """Its step calls that of its base, whose hooks torch then calls too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_inside_a_step_counts_once() -> None:
    model = nn.Linear(1, 1)
    torch.optim.SGD(model.parameters(), lr=1.0)  # torch puts hooks round a class's first instance
    optimizer = Careful(model.parameters(), lr=1.0)
    run = attach(model, optimizer, plan="ring")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert run.step == 3
    run.close()


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("once")
        return super().step(closure)


def test_a_step_that_failed_does_not_hide_those_after_it() -> None:
    model = nn.Linear(1, 1)
    optimizer = Failing(model.parameters(), lr=1.0)
    run = attach(model, optimizer, plan="ring")
    for number in range(4):
        optimizer.fails = number == 1
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        with suppress(ValueError):
            optimizer.step()
    assert run.step == 3
    run.close()

"""Gradient plans against one process that has the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.training.conftest import InOneCrew
from tests.training.workers import TIMEOUT, apart, fingerprint, on_ranks, one_value, same_bits
from thalweg.training import Run, attach

SIZE = 3
STEPS = 4
PLANS = ["ring", "tree", "star", "ring @ bucket=10KB", "halving_doubling"]

Loss = Callable[[nn.Module, int, int], torch.Tensor]
"""Of a model, a rank's samples, at a step."""


class Mixed(nn.Module):
    """All that has gone wrong elsewhere: three types, a layer used twice, one that is frozen, one
    that only rank 0 uses, one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 40)
        self.shared = nn.Linear(40, 40)
        self.also_shared = self.shared
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.sometimes = nn.Linear(40, 40)
        self.never = nn.Linear(40, 40)
        self.precise = nn.Linear(40, 20).double()
        self.coarse = nn.Linear(20, 12).bfloat16()

    def forward(self, x: torch.Tensor, extra: bool = False) -> torch.Tensor:
        h = self.shared(self.enter(x).tanh()).tanh()
        h = self.also_shared(h + self.frozen(h)).tanh()
        if extra:
            h = h + self.sometimes(h)
        out: torch.Tensor = self.coarse(self.precise(h.double()).bfloat16()).float()
        return out


def samples(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 6, generator=generator)


def squares(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(samples(rank, step), extra=rank == 0).square().mean()


def together(loss: Loss) -> Loss:
    """The mean over all ranks' samples, in one process."""
    return lambda model, _, step: torch.stack([loss(model, r, step) for r in range(SIZE)]).mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)


Training = Callable[[nn.Module, torch.optim.Optimizer, Loss, int, Run | None], None]
"""A whole training; without a run, the reference."""


def plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, rank: int, run: Run | None
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()


def keeping_zeros(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, rank: int, run: Run | None
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss(model, rank, step).backward()
        optimizer.step()


def clipping(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, rank: int, run: Run | None
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def accumulating(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, rank: int, run: Run | None
) -> None:
    """Three backwards a step; all but the last add up here."""
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            if run is None:
                loss(model, rank, 3 * step + part).backward()
            else:
                with run.no_sync():
                    loss(model, rank, 3 * step + part).backward()
        loss(model, rank, 3 * step + 2).backward()
        optimizer.step()


def accumulating_everywhere(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, rank: int, run: Run | None
) -> None:
    """The same, averaged every time."""
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            loss(model, rank, 3 * step + part).backward()
        optimizer.step()


def two_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, rank: int, run: Run | None
) -> None:
    """Of one graph."""
    for step in range(STEPS):
        optimizer.zero_grad()
        whole = loss(model, rank, step)
        (whole * 0.3).backward(retain_graph=True)
        (whole.square() * 0.7).backward()
        optimizer.step()


class Oops(Exception):
    pass


def failing_first(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, rank: int, run: Run | None
) -> None:
    """Every step fails once in mid-backward, after some buckets have left, and is done again."""
    enter = model.get_submodule("enter")

    def oops(_: torch.Tensor) -> None:
        raise Oops

    def lay_a_trap(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        output.register_hook(oops)

    for step in range(STEPS):
        optimizer.zero_grad()
        trap = enter.register_forward_hook(lay_a_trap)
        with pytest.raises(Oops):
            loss(model, rank, step).backward()
        trap.remove()
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()


def compare(
    rank: int,
    sync: str,
    training: Training,
    *,
    make: Callable[[], nn.Module] = Mixed,
    loss: Loss = squares,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    training(alone, optimizer(alone), together(loss), rank, None)
    steps = optimizer(model)
    run = attach(model, steps, plan=sync, timeout=TIMEOUT)
    training(model, steps, loss, rank, run)
    run.close()
    return {
        "apart": apart(model, alone),
        "moved": apart(alone, make()),
        "print": fingerprint(model),
        "without": [name for name, p in model.named_parameters() if p.grad is None],
        "without, alone": [name for name, p in alone.named_parameters() if p.grad is None],
    }


def assert_like_one_process(results: list[dict[str, Any]], tolerance: float = 2e-3) -> None:
    """Within the rounding of bfloat16, the coarsest of the types."""
    assert same_bits(results)
    assert results[0]["moved"] > 0.01
    assert max(result["apart"] for result in results) < tolerance
    assert one_value(results, "without") == one_value(results, "without, alone")


@pytest.mark.parametrize("sync", PLANS)
def test_plans(sync: str, in_one_crew: InOneCrew) -> None:
    results = in_one_crew(SIZE, lambda rank, sync: compare(rank, sync, plainly))
    assert_like_one_process(results)
    assert results[0]["without"] == [
        *("frozen.weight", "frozen.bias"),
        *("never.weight", "never.bias"),
    ]


@pytest.mark.parametrize("sync", ["ring", "ring @ bucket=10KB"])
@pytest.mark.parametrize(
    "training",
    [
        keeping_zeros,
        clipping,
        accumulating,
        accumulating_everywhere,
        two_losses,
        failing_first,
    ],
)
def test_ways_of_training(training: Training, sync: str, in_one_crew: InOneCrew) -> None:
    assert_like_one_process(in_one_crew(SIZE, compare))


def test_adam() -> None:
    """Which divides by tiny numbers: in one type, whose rounding is small."""
    results = on_ranks(
        SIZE,
        lambda rank: compare(rank, "tree", plainly, make=deep, loss=of_deep(None), optimizer=adam),
    )
    assert_like_one_process(results, tolerance=1e-5)


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)))


def of_deep(reentrant: bool | None) -> Loss:
    """Layer by layer: plainly, or each but the last recomputed in backward."""

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        h = samples(rank, step).requires_grad_()
        *layers, last = model.children()
        for layer in layers:
            h = layer(h) if reentrant is None else checkpoint(layer, h, use_reentrant=reentrant)
        return functional.mse_loss(last(h), torch.ones_like(h))

    return loss


@pytest.mark.parametrize("sync", ["ring", "ring @ bucket=100B"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("training", [plainly, accumulating])
def test_checkpointed_layers(
    sync: str, reentrant: bool, training: Training, in_one_crew: InOneCrew
) -> None:
    """A backward inside the backward, with buckets on their way."""

    def work(rank: int, sync: str, reentrant: bool, training: Training) -> dict[str, Any]:
        return compare(rank, sync, training, make=deep, loss=of_deep(reentrant))

    results = in_one_crew(SIZE, work)
    assert_like_one_process(results, tolerance=1e-6)


def test_a_coded_plan() -> None:
    """Every rank has several blocks, weighted by run.mean."""
    size = 4
    inputs = torch.randn(37, 6, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs)

    def trained(sync: str) -> nn.Module:
        torch.manual_seed(0)
        model = deep()
        optimizer = sgd(model)
        run = attach(model, optimizer, plan=sync, data=data, batch=8, timeout=TIMEOUT)
        for epoch in run.epochs(2):
            for (x,) in run.batches(epoch):
                optimizer.zero_grad()
                run.mean(model(x).square().mean(dim=1)).backward()
                optimizer.step()
        assert run.step == 2 * 5
        run.close()
        return model

    def work(rank: int) -> dict[str, Any]:
        coded = trained("gc(stragglers=1)")
        return {"apart": apart(coded, trained("ring")), "print": fingerprint(coded)}

    results = on_ranks(size, work)
    assert same_bits(results)
    assert max(result["apart"] for result in results) < 1e-6


def test_a_gradient_that_is_sparse() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = nn.Embedding(5, 3, sparse=True)
        run = attach(model, torch.optim.SGD(model.parameters(), 0.1), plan="ring", timeout=TIMEOUT)
        with pytest.raises(Exception, match="the gradient of weight is sparse") as info:
            model(torch.tensor([rank])).sum().backward()
        run.close()
        return {"kind": info.type.__name__}

    assert one_value(on_ranks(2, work), "kind") == "RunError"


def test_a_layer_used_in_two_checkpoints() -> None:
    """Its gradient is ready twice in one backward, the second time after it has left."""

    def work(rank: int) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = attach(model, optimizer, plan="ring @ bucket=1B", timeout=TIMEOUT)
        h = samples(rank, 0).requires_grad_()
        for _ in range(2):
            h = checkpoint(model[1], h, use_reentrant=True)
        with pytest.raises(Exception, match=r"1\.\w+ was ready twice in one backward; use") as info:
            model[0](h).sum().backward()
        run.close()
        return {"kind": info.type.__name__}

    assert one_value(on_ranks(2, work), "kind") == "RunError"

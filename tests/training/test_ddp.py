"""Torch's own DDP: under a plain model, and as an object that a script already has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from tests.faulty import Effect, Fault, FaultyTransport
from tests.training.conftest import InOneCrew
from tests.training.workers import (
    TIMEOUT,
    apart,
    fingerprint,
    on_ranks,
    one_value,
    raised,
    same_bits,
)
from thalweg.training import attach
from thalweg.transports import wrapping_transports

SIZE = 3
STEPS = 5


def deep(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers).to(dtype)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    waiting: Callable[[], Any] = nullcontext,
    accumulate: int = 1,
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulate):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            x = torch.randn(4, 20, generator=generator).to(next(model.parameters()).dtype)
            with waiting() if part < accumulate - 1 else nullcontext():
                model(x).square().mean().backward()
        optimizer.step()


def reference(
    rank: int, accumulate: int = 1, dtype: torch.dtype = torch.float32, **options: Any
) -> nn.Module:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = deep(dtype)
    ddp = DistributedDataParallel(model, **options)
    train(ddp, adam(model), rank, ddp.no_sync, accumulate)
    return model


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("sync", "options"), [("ddp", {}), ("ddp @ bucket=2KiB", {"bucket_cap_mb": 2 / 1024})]
)
def test_a_plain_model_under_ddp(sync: str, options: dict[str, Any], accumulate: int) -> None:
    def work(rank: int) -> dict[str, Any]:
        model = deep()
        optimizer = adam(model)
        run = attach(model, optimizer, plan=sync, timeout=TIMEOUT)
        kind = type(model).__name__
        train(model, optimizer, rank, run.no_sync, accumulate)
        run.close()
        wanted = reference(rank, accumulate, **options)
        return {"print": fingerprint(model), "ddp": fingerprint(wanted), "kind": kind}

    results = on_ranks(SIZE, work)
    assert one_value(results, "kind") == "Sequential"
    assert one_value(results, "print") == one_value(results, "ddp")


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.001}, {"static_graph": True}])
@pytest.mark.parametrize("sync", ["ring", "tree", "ddp"])
def test_a_ddp_object(sync: str, options: dict[str, Any], in_one_crew: InOneCrew) -> None:
    """Its buckets are laid out anew after the first step."""

    def work(rank: int, sync: str, options: dict[str, Any]) -> dict[str, Any]:
        wanted = reference(rank)
        model = deep()
        ddp = DistributedDataParallel(model, **options)
        optimizer = adam(model)
        run = attach(ddp, optimizer, plan=sync, timeout=TIMEOUT)
        train(ddp, optimizer, rank)
        steps = run.step
        run.close()
        return {"print": fingerprint(model), "apart": apart(model, wanted), "steps": steps}

    results = in_one_crew(SIZE, work)
    assert same_bits(results)
    assert one_value(results, "steps") == STEPS
    assert max(result["apart"] for result in results) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_ddp_object_of_another_type(dtype: torch.dtype, in_one_crew: InOneCrew) -> None:
    def work(rank: int, dtype: torch.dtype) -> dict[str, Any]:
        wanted = reference(rank, dtype=dtype)
        model = deep(dtype)
        ddp = DistributedDataParallel(model)
        optimizer = adam(model)
        run = attach(ddp, optimizer, plan="ring", timeout=TIMEOUT)
        train(ddp, optimizer, rank)
        run.close()
        return {"print": fingerprint(model), "apart": apart(model, wanted)}

    results = in_one_crew(2, work)
    assert same_bits(results)
    tolerance = 1e-14 if dtype is torch.float64 else 0.01
    assert max(result["apart"] for result in results) < tolerance


def test_accumulating_in_a_ddp_object() -> None:
    def work(rank: int) -> dict[str, Any]:
        wanted = reference(rank, 3)
        model = deep()
        ddp = DistributedDataParallel(model)
        optimizer = adam(model)
        run = attach(ddp, optimizer, plan="ring", timeout=TIMEOUT)
        train(ddp, optimizer, rank, run.no_sync, 3)
        messages = len({arrival.step for arrival in run._arrivals})
        run.close()
        return {
            "print": fingerprint(model),
            "apart": apart(model, wanted),
            "rounds": messages,
        }

    results = on_ranks(SIZE, work)
    assert same_bits(results)
    assert max(result["apart"] for result in results) < 1e-6


@pytest.mark.parametrize(
    ("sync", "said"),
    [
        ("gossip", "a DDP object averages gradients"),
        ("gc(stragglers=1)", "a DDP object waits for all ranks, and gc(stragglers=1) for none"),
    ],
)
def test_what_a_ddp_object_cannot_do(sync: str, said: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, sync: str) -> dict[str, Any]:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        ddp = DistributedDataParallel(deep())
        data = TensorDataset(torch.ones(8, 6))
        options: dict[str, Any] = {"data": data, "batch": 4, "timeout": TIMEOUT}
        return raised(lambda: attach(ddp, adam(ddp), plan=sync, **options))

    results = in_one_crew(2, work)
    assert one_value(results, "kind") == "PlanError"
    assert one_value(results, "text").startswith(said)


def test_a_ddp_object_keeps_its_plan() -> None:
    def work(rank: int) -> dict[str, Any]:
        dist.init_process_group("gloo")
        ddp = DistributedDataParallel(deep())
        run = attach(ddp, adam(ddp), plan="ring", timeout=TIMEOUT)
        refused = raised(lambda: run.switch("tree"))
        run.close()
        return refused

    assert one_value(on_ranks(2, work), "kind") == "PlanError"


def test_a_ddp_object_without_a_plan_stays_as_it_is() -> None:
    def work(rank: int) -> dict[str, Any]:
        dist.init_process_group("gloo")
        ddp = DistributedDataParallel(deep())
        with attach(ddp, adam(ddp), timeout=TIMEOUT) as run:
            return {"plan": str(run.plan)}

    assert one_value(on_ranks(2, work), "plan") == "ddp"


def test_an_error_in_the_hook_is_raised_as_it_is() -> None:
    """A message that is lost: PeerLate or what the other ranks make of it, not DDP's own words."""

    def work(rank: int) -> dict[str, Any]:
        dist.init_process_group("gloo")
        ddp = DistributedDataParallel(deep())
        optimizer = adam(ddp)
        fault = Fault(rank=0, step=2, move=0, effect=Effect.LOSE)
        with wrapping_transports(lambda transport: FaultyTransport(transport, [fault])):
            attach(ddp, optimizer, plan="ring", timeout="3s")
        return raised(lambda: train(ddp, optimizer, rank))

    results = on_ranks(SIZE, work)
    assert {result["kind"] for result in results} <= {"PeerLate", "PeerFailed"}

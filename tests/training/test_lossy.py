"""Plans that wait for nobody and aren't exact: lgc and asp."""

from __future__ import annotations

import warnings
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.training.workers import TIMEOUT, fingerprint, on_ranks, one_value, same_bits, values
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.launch.worker_group import WorkerGroup
from thalweg.training import Run, attach

SAMPLES, BATCH, SIZE = 256, 32, 4
PLANS = ["lgc(k=3)", "asp", "asp(staleness=0)"]


def problem() -> tuple[TensorDataset, nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 3, generator=generator)
    data = TensorDataset(inputs, inputs @ torch.tensor([1.0, -2.0, 3.0]) + 0.5)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return data, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def epochs(run: Run, model: nn.Module, optimizer: Any, number: int, naps: Any = None) -> None:
    for epoch in run.epochs(number):
        for x, y in run.batches(epoch):
            if naps is not None:
                naps(run)
            optimizer.zero_grad()
            run.mean((model(x)[:, 0] - y).square()).backward()
            optimizer.step()


@pytest.mark.parametrize("sync", PLANS)
def test_it_learns_and_all_end_with_the_same(sync: str) -> None:
    def work(rank: int) -> dict[str, Any]:
        data, model, optimizer = problem()
        run = attach(model, optimizer, plan=sync, data=data, batch=BATCH, timeout=TIMEOUT)
        epochs(run, model, optimizer, 15)
        with run.consensus():
            result = {"print": fingerprint(model), "values": values(model)}
        run.close()
        return result

    results = on_ranks(SIZE, work)
    assert same_bits(results)
    assert one_value(results, "values") == pytest.approx([1.0, -2.0, 3.0, 0.5], abs=0.02)


@pytest.mark.parametrize("sync", ["lgc(k=3)", "asp(staleness=4)"])
def test_nobody_waits_for_a_late_worker(sync: str) -> None:
    """One of four sleeps at every step of its first epoch; lgc's others go on without it, asp's
    are at most four steps ahead."""

    def work(rank: int) -> dict[str, Any]:
        data, model, optimizer = problem()
        run = attach(model, optimizer, plan=sync, data=data, batch=BATCH, timeout=TIMEOUT)
        naps = (lambda run: sleep(0.05) if run.step < 4 else None) if rank == 2 else None
        epochs(run, model, optimizer, 10, naps)
        with run.consensus():
            result = {"print": fingerprint(model), "values": values(model)}
        run.close()
        return result

    results = on_ranks(SIZE, work)
    assert same_bits(results)
    assert one_value(results, "values") == pytest.approx([1.0, -2.0, 3.0, 0.5], abs=0.05)


class KillAt:
    """A director: this rank, when anybody has come to that step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def prepare(self) -> None:
        pass

    def poll(self, workers: WorkerGroup) -> None:
        if self.rank in workers.running and max(workers.steps.values(), default=0) >= self.step:
            workers.kill(self.rank)
            self.step = 1 << 30


@pytest.mark.parametrize("sync", ["lgc(k=2)", "asp"])
def test_a_dead_workers_share_is_dropped(sync: str) -> None:
    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        warnings.filterwarnings("ignore", message="rank 3 failed")
        data, model, optimizer = problem()
        run = attach(model, optimizer, plan=sync, data=data, batch=BATCH, timeout=TIMEOUT)

        def naps(run: Run) -> None:
            report({"step": run.step})
            sleep(0.01)

        epochs(run, model, optimizer, 10, naps)
        with run.consensus():
            result = {"print": fingerprint(model), "values": values(model), "steps": run.step}
        run.close()
        return result

    results = run_workers(
        SIZE, work, timeout=60, director=KillAt(3, 10), on_line=lambda *_: None, spare=[1, 2, 3]
    )
    assert not results[3]
    assert same_bits(results[:3])
    assert one_value(results[:3], "steps") == 80
    assert one_value(results[:3], "values") == pytest.approx([1.0, -2.0, 3.0, 0.5], abs=0.05)


@pytest.mark.parametrize("sync", ["lgc(k=3)", "asp(staleness=0)"])
def test_a_checkpoint_goes_on(sync: str, tmp_path: Path) -> None:
    def work(number: int) -> Any:
        def run_it(rank: int) -> dict[str, Any]:
            data, model, optimizer = problem()
            run = attach(
                model,
                optimizer,
                plan=sync,
                data=data,
                batch=BATCH,
                timeout=TIMEOUT,
                resume=tmp_path,
            )
            first = run.step
            epochs(run, model, optimizer, number)
            run.save(tmp_path)
            result = {"print": fingerprint(model), "first": first, "state": len(optimizer.state)}
            run.close()
            return result

        return run_it

    before = on_ranks(SIZE, work(3))
    assert one_value(before, "first") == 0
    after = on_ranks(SIZE, work(6))
    assert one_value(after, "first") == 24
    assert same_bits(after)
    assert after[0]["state"] == 2  # momentum, which the server keeps, is the root's to save


def test_ring_to_asp_and_back() -> None:
    def work(rank: int) -> dict[str, Any]:
        data, model, optimizer = problem()
        run = attach(model, optimizer, plan="ring", data=data, batch=BATCH, timeout=TIMEOUT)
        plans = set()

        def change(run: Run) -> None:
            plans.add(str(run.plan))
            if rank == 0 and run.step == 4:
                run.switch("asp(staleness=0)")
            elif rank == 0 and run.step == 20:
                run.switch("ring")

        epochs(run, model, optimizer, 10, change)
        result = {"print": fingerprint(model), "values": values(model), "plans": sorted(plans)}
        run.close()
        return result

    results = on_ranks(SIZE, work)
    assert one_value(results, "plans") == ["asp(staleness=0)", "ring"]
    assert same_bits(results)
    assert one_value(results, "values") == pytest.approx([1.0, -2.0, 3.0, 0.5], abs=0.05)

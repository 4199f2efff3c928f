"""What a plan costs in memory, over what DDP does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.training.workers import TIMEOUT, on_ranks
from thalweg.training import Run, attach
from thalweg.workloads import Job, find_job

GRADIENTS = 25_000_000 * 4  # bytes
STEPS = 6


def status(key: str) -> int:
    """Of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise LookupError(key)


def forget_the_peak() -> None:
    """What the supervisor had before it forked."""
    Path("/proc/self/clear_refs").write_text("5")


class Training:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = job.model()
        self.optimizer = job.optimizer(self.model.parameters())

    def attach(self, sync: str) -> Run:
        return attach(self.model, self.optimizer, sync=sync, timeout=TIMEOUT)

    def step(self) -> None:
        batch = [self.job.data[index] for index in range(8)]
        inputs, targets = (torch.stack(part) for part in zip(*batch, strict=True))
        self.optimizer.zero_grad()
        self.job.losses(self.model, (inputs, targets)).mean().backward()
        self.optimizer.step()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_peak() -> None:
    """At most two copies of the gradients more than DDP, and none more at later steps."""
    job = find_job("synthetic(params=25M)")

    def peak(sync: str) -> list[dict[str, Any]]:
        def work(rank: int) -> dict[str, Any]:
            training = Training(job)
            forget_the_peak()
            before = status("VmRSS")
            run = training.attach(sync)
            resident = []
            for _ in range(STEPS):
                training.step()
                resident.append(status("VmRSS"))
            run.close()
            return {"peak": status("VmHWM") - before, "growth": max(resident[2:]) - resident[1]}

        return on_ranks(2, work)

    ddp = max(result["peak"] for result in peak("ddp"))
    ring = peak("ring")
    assert max(result["peak"] for result in ring) < ddp + 2 * GRADIENTS
    assert max(result["growth"] for result in ring) < GRADIENTS / 4


@pytest.mark.parametrize("sync", ["ring", "ring @ bucket=100KB", "local_sgd(every=1)"])
def test_a_step_allocates_nothing_of_the_size_of_the_gradients(sync: str) -> None:
    """Compared with a step of the same model by itself."""
    job = find_job("synthetic(params=250k)")
    gradients = 250_000 * 4

    def allocated(training: Training) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            training.step()
        results = recorded.profiler
        assert results is not None
        assert results.kineto_results is not None
        events = results.kineto_results.events()
        return sum(max(0, e.nbytes()) for e in events if e.name() == "[memory]")

    def work(rank: int) -> dict[str, Any]:
        training = Training(job)
        training.step()
        alone = allocated(training)
        run = training.attach(sync)
        training.step()
        attached = allocated(training)
        run.close()
        return {"alone": alone, "attached": attached}

    for result in on_ranks(2, work):
        assert result["alone"] > gradients
        assert result["attached"] - result["alone"] < gradients / 10

"""What a plan costs in memory, over what DDP does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.training.workers import SECONDS, TIMEOUT, on_ranks
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.launch.worker_group import WorkerGroup
from thalweg.launch.worker_process import RESTARTS_VARIABLE
from thalweg.training import Run, api, attach
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
        return attach(self.model, self.optimizer, plan=sync, timeout=TIMEOUT)

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


# What it costs that members may change


class Restart:
    """A director that starts this rank again once it has died."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lives = 0

    def prepare(self) -> None: ...

    def poll(self, workers: WorkerGroup) -> None:
        living = self.rank in workers.running
        if self.lives == 0 and living:
            self.lives = 1
        elif self.lives == 1 and not living:
            self.lives = 2
            workers.restart(self.rank)


def peaks(
    job: Job, make: Callable[[Any], torch.optim.Optimizer], sync: str, dies: bool, comes_back: bool
) -> tuple[float, float]:
    """Of all ranks, in gradients: up to where one dies, and from there on."""
    gradients = sum(p.nbytes for p in job.model().parameters())
    dead, at = 2, 4

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        training = Training(job)
        model, optimizer = training.model, make(training.model.parameters())
        forget_the_peak()
        before = status("VmRSS")
        run = attach(model, optimizer, plan=sync, data=job.data, batch=12, timeout=TIMEOUT)
        calm = 0
        for batch in run.batches(0):
            if run.step == at and not calm:
                calm = status("VmHWM") - before
                if dies and rank == dead and os.environ[RESTARTS_VARIABLE] == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
                forget_the_peak()
            optimizer.zero_grad()
            run.mean(job.losses(model, batch)).backward()
            optimizer.step()
            if run.step > at and run.size == (2 if dies and not comes_back else 3):
                run.stop()
        run.close()
        return {
            "calm": calm,
            "peak": status("VmHWM") - before,
            "incidents": len([e for e in run.events if e.kind == "incident"]),
        }

    results = run_workers(
        3,
        work,
        timeout=SECONDS,
        spare=range(3),
        director=Restart(dead) if comes_back else None,
        debug=True,
    )
    lived = [result for result in results if result]
    assert len(lived) == (2 if dies and not comes_back else 3)
    assert all(result["incidents"] > 0 for result in lived) == dies
    return tuple(max(r[key] for r in lived) / gradients for key in ("calm", "peak"))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("sync", "make"),
    [
        ("ring", momentum),
        ("ring", torch.optim.Adam),
        ("hierarchical+powersgd(rank=2)", momentum),
    ],
)
def test_members_that_may_change(
    sync: str,
    make: Callable[[Any], torch.optim.Optimizer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most three gradients more than where they can't: neither undisturbed, nor while those who
    are left form anew, nor while one that comes back takes another's state."""
    job = find_job("synthetic(params=25M)")
    with monkeypatch.context() as fixed:
        fixed.setattr(api, "_may_change", lambda *_: False)
        without = max(peaks(job, make, sync, dies=False, comes_back=False))
    calm, regrouped = peaks(job, make, sync, dies=True, comes_back=False)
    _, joined = peaks(job, make, sync, dies=True, comes_back=True)
    assert calm < without + 1
    assert regrouped < without + 3
    assert joined < without + 3

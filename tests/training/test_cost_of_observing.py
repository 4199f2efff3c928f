"""What observing takes of a training: CPU of its thread, and time of the training thread."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter, sleep, thread_time
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.workers import on_ranks
from thalweg.training import attach

COMPUTE = 0.05  # seconds
LAYERS = 12


@pytest.mark.parametrize(
    ("size", "steps"), [(2, 100), pytest.param(4, 200, marks=pytest.mark.slow)]
)
def test_below_one_percent_of_step_time(size: int, steps: int, tmp_path: Path) -> None:
    """With records, on every rank: the one that judges too."""

    def work(rank: int) -> dict[str, Any]:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(LAYERS)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        run = attach(model, optimizer, plan="ring", timeout="60s", records=str(tmp_path))
        began = perf_counter()
        for _ in range(steps):
            sleep(COMPUTE)
            optimizer.zero_grad()
            model(torch.ones(3, 256)).square().mean().backward()
            optimizer.step()
        seconds = perf_counter() - began
        run.close()
        timer = run._timer
        hooks = 2 * LAYERS * steps * _seconds_of_a_hook(partial(timer._gradient_ready, ""))
        spent = timer.monitor.cpu_seconds + timer.blocked + hooks
        return {"share": spent / seconds, "steps": run.report().totals[rank].steps}

    results = on_ranks(size, work, seconds=100)
    assert [result["steps"] for result in results] == [steps] * size
    largest = max(result["share"] for result in results)
    print(f"{largest:.2%} of step time on the rank that takes most")
    assert largest < 0.01, results


def _seconds_of_a_hook(hook: Any, times: int = 2000) -> float:
    """When one has been called in this backward, as all but the first have."""
    waiting = torch.zeros(1)

    hook.func.__self__._end = lambda: hook
    began = thread_time()
    for _ in range(times):
        hook(waiting)
    return (thread_time() - began) / times

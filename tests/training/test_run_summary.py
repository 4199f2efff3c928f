"""What run.report() has, and what it does only when it is asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.training.workers import TIMEOUT, on_ranks
from thalweg.training import attach


def test_a_report_is_of_its_moment() -> None:
    """Later steps don't change it, and it costs no collective: one rank asks alone."""

    def work(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        reports = []
        with attach(model, optimizer, plan="ring+fp16", timeout=TIMEOUT) as run:
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(2, 8)).square().mean().backward()
                optimizer.step()
                if rank == 0:
                    reports.append(run.report())
            whole = run.report(drift=True, residuals=True)
        assert all(report.drift is None and report.residuals is None for report in reports)
        last = run.report()
        return {
            "timed": [len(report.timings) for report in reports],
            "drift": whole.drift,
            "left out": sorted(whole.residuals or {}),
            "ranks": sorted(last.totals),
            "rows": len(last.table().splitlines()),
            "before": [report.totals[rank].steps for report in reports],
            "after": last.totals[rank].steps,
        }

    first, second = on_ranks(2, work)
    assert first["timed"] == [1, 2, 3, 4]
    assert first["drift"] == second["drift"] == 0.0
    assert first["ranks"] == [0, 1]
    assert second["ranks"] == [1]
    assert first["rows"] - second["rows"] == 1
    assert first["before"][0] < first["after"]

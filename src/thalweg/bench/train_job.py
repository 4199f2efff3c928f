"""Training of a job on all workers of a deployment, and a summary of their results."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from thalweg.bench.run_everywhere import Deployment, Report, Result, run_everywhere
from thalweg.bench.training import Recipe, train
from thalweg.catalog import parse_plan
from thalweg.facts import Cluster, Duration
from thalweg.redundancy import spare_ranks
from thalweg.schedules import Group
from thalweg.training import Run
from thalweg.workloads import Job

INTERRUPT_GRACE_SECONDS = 30.0  # to stop at a common step and save


def train_everywhere(
    deployment: Deployment,
    job: Job,
    sync: str,
    recipe: Recipe,
    progress: Report,
    restarts: int = 0,
) -> list[Result]:
    """Train on all workers of a deployment and return their results by rank.

    The result of a killed worker is empty; launched ranks other than 0 get no results.
    """

    def work(rank: int, report: Report) -> Result:
        return train(job, sync, recipe, report, _stop_on_interrupt)[1]

    cluster = deployment.cluster or Cluster.flat(deployment.workers)
    return run_everywhere(
        deployment,
        work,
        progress,
        timeout=None,
        collect_timeout=Duration.parse(recipe.timeout).seconds,
        grace=INTERRUPT_GRACE_SECONDS if recipe.checkpoint else 5.0,
        spare=spare_ranks(parse_plan(sync), Group.everybody(cluster)),
        survives=True,
        restarts=restarts,
    )


def step_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row per step: the mean loss and step time of the ranks that took it."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for result in filter(None, results):
        taken = zip(result["losses"], result["seconds"], strict=True)
        for step, figures in zip(result["steps"], taken, strict=True):
            by_step.setdefault(step, []).append(figures)
    return [
        {"step": step, "loss": fmean(loss), "seconds": fmean(seconds)}
        for step, (loss, seconds) in ((n, zip(*f, strict=True)) for n, f in sorted(by_step.items()))
    ]


def summary(results: Sequence[Result], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A summary of the run; its step time leaves out the warm-up steps."""
    known = [result for result in results if result]
    first = known[0]
    timed = [row["seconds"] for row in rows[min(5, len(rows) // 2) :]]
    copied = ("metric", "fingerprint", "stopped", "approximate", "adjustments", "incidents")
    return {
        "final_loss": rows[-1]["loss"] if rows else None,
        "seconds_per_step": fmean(timed) if timed else None,
        "steps": rows[-1]["step"] if rows else first["first_step"],
        "identical": len({result["fingerprint"] for result in known}) == 1,
        "peak_bytes": max(result["peak_bytes"] for result in known),
        "lost": [rank for rank, result in enumerate(results) if not result],
        **{key: first[key] for key in (*copied, "choices", "late", "ranks")},
    }


def _stop_on_interrupt(run: Run) -> None:
    """Make Ctrl-C stop all ranks at an agreed step, where a checkpoint can be written."""
    signal.signal(signal.SIGINT, lambda *_: run.stop())

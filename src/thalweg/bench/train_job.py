"""A job trained by all workers of a run, and what they report put together."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from thalweg.bench.site import Deployment
from thalweg.bench.training import Recipe, WorkerResult, train
from thalweg.catalog import parse_plan
from thalweg.errors import RunError
from thalweg.facts import Cluster, Duration
from thalweg.launch.rank_assignment import read_rank_assignment
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.redundancy import spare_ranks
from thalweg.schedules import Group
from thalweg.training import Run
from thalweg.workloads import Job

INTERRUPT_GRACE_SECONDS = 30.0  # seconds for a run to stop at a common step and save
Result = dict[str, Any]
Progress = Callable[[Mapping[str, Any]], None]


def launched() -> bool:
    """Whether this process was started as one worker of several."""
    return read_rank_assignment(os.environ).launcher != "alone"


def train_at(
    deployment: Deployment,
    job: Job,
    sync: str,
    recipe: Recipe,
    progress: Progress,
    restarts: int = 0,
) -> list[Result]:
    """By forks of this process at that site; every worker's result, empty if it was killed."""

    def work(rank: int, report: SendMessage) -> Result:
        tells = report if rank == 0 else lambda message: None  # for all
        return result_of(train(job, sync, recipe, tells, _stop_on_interrupt))

    def heard(rank: int, message: dict[str, Any]) -> None:
        progress(message)

    grace = INTERRUPT_GRACE_SECONDS if recipe.checkpoint else 5.0
    cluster = deployment.cluster or Cluster.flat(deployment.workers)
    return run_workers(
        deployment.workers,
        work,
        timeout=None,
        on_message=heard,
        grace=grace,
        place=deployment.place,
        spare=spare_ranks(parse_plan(sync), Group.everybody(cluster)),
        survives=True,
        restarts=restarts,
    )


def train_here(job: Job, sync: str, recipe: Recipe, progress: Progress) -> list[Result] | None:
    """As one worker of a launcher's; every worker's result on rank 0, None on the others."""
    own = result_of(train(job, sync, recipe, progress, _stop_on_interrupt))
    seconds = Duration.parse(recipe.timeout).seconds
    world = World.join(seconds)
    world.put(f"result/{world.rank}", json.dumps(own))
    abort_flag = world.abort_flag()
    results = None
    if world.rank == 0:
        results = [_result(world, abort_flag, rank, seconds) for rank in range(world.size)]
    world.leave(seconds, abort_flag)
    return results


def _result(world: World, abort_flag: AbortFlag, rank: int, seconds: float) -> Result:
    found = world.wait_for(f"result/{rank}", seconds, abort_flag)
    if found is None:
        raise RunError(f"rank {rank} hasn't told its result", "look at its output")
    result: Result = json.loads(found)
    return result


def result_of(outcome: WorkerResult) -> Result:
    return {
        "first_step": outcome.first_step,
        "steps": outcome.steps,
        "losses": outcome.losses,
        "seconds": outcome.seconds,
        "evaluations": outcome.evaluations,
        "metric": outcome.metric,
        "deviation": outcome.deviation,
        "fingerprint": outcome.fingerprint,
        "peak_bytes": outcome.peak_nbytes,
        "stopped": outcome.stopped,
        "approximate": outcome.approximate,
        "adjustments": [asdict(made) for made in outcome.adjustments],
        "incidents": [asdict(change) for change in outcome.incidents],
        "choices": [asdict(chosen) for chosen in outcome.choices],
        "timings": [asdict(timing) for timing in outcome.timings],
        "late": [
            {"step": step, "late": [each.entries() for each in stragglers]}
            for step, stragglers in outcome.stragglers
        ],
        "ranks": [{"rank": rank, **t.each()} for rank, t in sorted(outcome.tallies.items())],
        "summary": outcome.summary,
    }


def step_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Per step: the mean losses and seconds of the ranks that took it."""
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
    """The run in a few figures; the first steps, which set things up, don't count for the time."""
    told = [result for result in results if result]
    warm = [row["seconds"] for row in rows[min(5, len(rows) // 2) :]]
    return {
        "final_loss": rows[-1]["loss"] if rows else None,
        "metric": told[0]["metric"],
        "seconds_per_step": fmean(warm) if warm else None,
        "steps": rows[-1]["step"] if rows else told[0]["first_step"],
        "identical": len({result["fingerprint"] for result in told}) == 1,
        "fingerprint": told[0]["fingerprint"],
        "peak_bytes": max(result["peak_bytes"] for result in told),
        "stopped": told[0]["stopped"],
        "approximate": told[0]["approximate"],
        "adjustments": told[0]["adjustments"],
        "incidents": told[0]["incidents"],
        "choices": told[0]["choices"],
        "late": told[0]["late"],
        "ranks": told[0]["ranks"],
        "lost": [rank for rank, result in enumerate(results) if not result],
    }


def _stop_on_interrupt(run: Run) -> None:
    """Ctrl-C: stop at a step that all agree on, where a checkpoint can be written."""
    signal.signal(signal.SIGINT, lambda *_: run.stop())

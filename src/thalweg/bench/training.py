"""Training of a job under a plan: by one rank of a run, as a user's script would do it, and on all
workers of a deployment, with a summary of their results."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from time import monotonic, perf_counter, sleep
from typing import Any

import torch
from torch import nn

from thalweg.bench.run_everywhere import Deployment, Report, Result, run_everywhere
from thalweg.bench.simulated_compute import ComputeSleeper, SimulatedCompute, shares_of
from thalweg.catalog import parse_plan
from thalweg.errors import RunError, UsageError
from thalweg.facts import Duration, grouped
from thalweg.launch.launcher_variables import CLUSTER_VARIABLE
from thalweg.members.world import MAX_STORE_POLL_SECONDS, World
from thalweg.redundancy import spare_ranks
from thalweg.schedules import Group
from thalweg.training import Run, attach
from thalweg.training.auto.policy import PlanChoice
from thalweg.training.events import RunEvent
from thalweg.workloads import Job

INTERRUPT_GRACE_SECONDS = 30.0  # to stop at a common step and save
STORE_NOTICE_SECONDS = 2 * MAX_STORE_POLL_SECONDS  # by then every rank has polled the store
Progress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The options of a training run apart from its plan."""

    steps: int
    seed: int = 0  # of the initial parameters and of the order of samples
    batch: int | None = None  # the job's own if None
    accumulate: int = 1  # backward passes per step
    clip: float | None = None  # the maximum norm of all gradients together
    frozen: bool = False  # the model's first tensor isn't trained
    dtype: torch.dtype = torch.float32
    checkpoint: Path | None = None
    save_every: int | None = None  # steps; at the end only if None
    timeout: str = "10min"
    evaluate_every: int | None = None  # steps; at the end only if None
    injection: SimulatedCompute | None = None  # sleeps in place of computation
    records: Path | None = None  # a folder for the records of each rank


def train(
    job: Job,
    sync: str,
    recipe: Recipe,
    progress: Progress = lambda _: None,
    on_start: Callable[[Run], None] = lambda _: None,
) -> tuple[nn.Module, Result]:
    """Train on this rank and return the model and a result that JSON can represent.

    `losses` are of the rank's own samples. `evaluations` are pairs of a step and the metric there,
    and take no part in `seconds`. `deviation` is the relative distance of the rank's parameters
    from the mean of all ranks. `approximate` maps a step to the fraction of the batch that its
    gradient has seen. Under a gradient code, `steps` lacks those that a slow rank skipped.
    """
    model = job.model(recipe.seed).to(recipe.dtype)
    if recipe.frozen:
        next(model.parameters()).requires_grad_(False)
    optimizer = job.optimizer(p for p in model.parameters() if p.requires_grad)
    in_lab = CLUSTER_VARIABLE in os.environ  # it has published the scenario's cluster
    run = attach(
        model,
        optimizer,
        plan=sync,
        data=job.data,
        batch=recipe.batch or job.batch,
        resume=recipe.checkpoint,
        seed=recipe.seed,
        cluster=None if recipe.injection is None or in_lab else recipe.injection.cluster,
        timeout=recipe.timeout,
        records=recipe.records,
    )
    on_start(run)
    first_step = run.step
    if recipe.steps < first_step:
        raise UsageError(
            f"the checkpoint is at step {first_step}, beyond {recipe.steps}", "give more steps"
        )
    taken = _steps(run, job, model, optimizer, recipe, progress)
    if recipe.checkpoint is not None:
        run.save(recipe.checkpoint)
    with run.consensus():
        metric = _evaluate(job, model)
        mean = flat(model)
    timings = [asdict(timing) for timing in run.report().timings]
    run.close()
    report, events = run.report(), run.events
    return model, {
        "first_step": first_step,
        **taken,
        "metric": metric,
        "deviation": float((flat(model) - mean).norm() / mean.norm()),
        "fingerprint": fingerprint(model),
        "peak_bytes": _peak_nbytes(),
        "stopped": run.should_stop,
        "approximate": {e.step: e.data for e in events if e.kind == "approximate"},
        "adjustments": [asdict(e.data) for e in events if e.kind == "groups"],
        "incidents": [asdict(e.data) for e in events if e.kind == "incident"],
        "choices": [asdict(chosen) for chosen in choices_of(events)],
        "timings": timings,
        "late": [
            {"step": step, "late": [asdict(straggler) for straggler in stragglers]}
            for step, stragglers in report.changes
        ],
        "ranks": [{"rank": rank, **t.each()} for rank, t in sorted(report.totals.items())],
        "summary": report.table(),
    }


def choices_of(events: Sequence[RunEvent]) -> list[PlanChoice]:
    """The choices of `auto`, with their step times: an event with one comes after the choice's."""
    made: Iterable[PlanChoice] = (event.data for event in events if event.kind == "auto")
    return list({replace(choice, measured=None): choice for choice in made}.values())


def _steps(
    run: Run,
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    progress: Progress,
) -> dict[str, list[Any]]:
    """Take the steps, and return their numbers, losses and times, and the evaluations."""
    taken: dict[str, list[Any]] = {"steps": [], "losses": [], "seconds": [], "evaluations": []}
    if run.step >= recipe.steps:
        return taken
    world, every = None, recipe.evaluate_every or sys.maxsize
    if recipe.evaluate_every is not None:
        world = World.join(Duration.parse(recipe.timeout).seconds)
    sleeper, injection = None, recipe.injection
    if injection is not None:
        cluster = injection.cluster
        sleeper = ComputeSleeper(
            injection, run.rank, model, lambda: shares_of(run.plan, cluster, run.rank)
        )
    for epoch in run.epochs(sys.maxsize):
        start = perf_counter()
        for number, batch in enumerate(run.batches(epoch), start=1):
            whole = number % recipe.accumulate == 0
            first = (number - 1) % recipe.accumulate == 0
            if sleeper is not None and first and run.counts:
                sleeper.begin(run.step)
            loss = _backward(run, job, model, tuple(batch), recipe, whole)
            if not whole:
                continue
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
            if run.step in taken["steps"][-1:]:
                continue  # the step was interrupted, and is repeated
            seconds = perf_counter() - start
            for key, value in (("steps", run.step), ("losses", loss), ("seconds", seconds)):
                taken[key].append(value)
            progress({"step": run.step, "loss": loss, "seconds": seconds})
            if world is not None and run.step % every == 0:
                metric = _evaluate_consensus(run, job, model, world)
                taken["evaluations"].append((run.step, metric))
            if run.step >= recipe.steps:
                return taken
            if recipe.checkpoint and recipe.save_every and run.step % recipe.save_every == 0:
                run.save(recipe.checkpoint)
            start = perf_counter()
        optimizer.zero_grad()  # the epoch may end within an accumulation
    return taken


def _evaluate_consensus(run: Run, job: Job, model: nn.Module, world: World) -> float:
    """Evaluate the consensus model between two steps, at no cost to the step times.

    Cores are few, so rank 0 evaluates alone and publishes the metric with a time, by the clock
    that the processes of one machine share, at which all ranks continue. So no step waits for a
    rank that is still busy with the evaluation.
    """
    key = f"evaluated/{run.step}"
    with run.consensus():
        if run.rank == 0:
            metric = _evaluate(job, model)
            world.put(key, json.dumps([metric, monotonic() + STORE_NOTICE_SECONDS]))
        late = RunError(
            f"rank 0 hasn't evaluated step {run.step} after {world.timeout:g} s",
            "evaluate fewer samples, or allow more time",
        )
        published = world.read(key, world.abort_flag(), late)
    metric, resume = map(float, json.loads(published))
    sleep(max(0.0, resume - monotonic()))
    return metric


def _evaluate(job: Job, model: nn.Module) -> float:
    evaluated = job.model()  # in float32, like the held-out samples
    evaluated.load_state_dict(model.state_dict())
    return job.evaluate(evaluated)


def _backward(
    run: Run, job: Job, model: nn.Module, batch: tuple[torch.Tensor, ...], recipe: Recipe, now: bool
) -> float:
    """Run one backward pass; gradients are synchronised in the last one of a step."""
    inputs = tuple(t.to(recipe.dtype) if t.is_floating_point() else t for t in batch)
    waiting: AbstractContextManager[None] = nullcontext() if now else run.no_sync()
    with waiting:  # includes the forward, in which DDP decides
        losses = job.losses(model, inputs).float()
        torch.autograd.backward(run.mean(losses) / recipe.accumulate)
    return float(losses.detach().mean())


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters concatenated into one vector."""
    return torch.cat([p.detach().double().cpu().reshape(-1) for p in model.parameters()])


def fingerprint(model: nn.Module) -> str:
    """A digest that two models share if and only if their values are bitwise identical."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _peak_nbytes() -> int:
    """The peak memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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

    return run_everywhere(
        deployment,
        work,
        progress,
        timeout=None,
        collect_timeout=Duration.parse(recipe.timeout).seconds,
        grace=INTERRUPT_GRACE_SECONDS if recipe.checkpoint else 5.0,
        spare=spare_ranks(parse_plan(sync), Group.everybody(deployment.declared)),
        survives=True,
        restarts=restarts,
    )


def by_step(results: Sequence[Mapping[str, Any] | None], key: str) -> dict[int, float]:
    """The mean loss or seconds of each step, over the ranks that took it."""
    values_of_step = grouped(
        pair
        for result in filter(None, results)
        for pair in zip(result["steps"], result[key], strict=True)
    )
    return {step: fmean(values) for step, values in sorted(values_of_step.items())}


def step_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row per step: the mean loss and step time of the ranks that took it."""
    losses, seconds = by_step(results, "losses"), by_step(results, "seconds")
    return [{"step": step, "loss": losses[step], "seconds": seconds[step]} for step in losses]


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

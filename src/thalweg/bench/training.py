"""Train a job under a plan, in one worker: what several commands have in common."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import torch
from torch import nn

from thalweg.bench.simulated_compute import ComputeSleeper, SimulatedCompute, shares_of
from thalweg.catalog import parse_plan
from thalweg.errors import RunError, UsageError
from thalweg.facts import Cluster, Duration
from thalweg.launch.rank_assignment import CLUSTER_VARIABLE
from thalweg.members.world import MAX_STORE_POLL_SECONDS, World
from thalweg.observe import StepTotals, Straggler
from thalweg.training import Run, attach
from thalweg.training.auto.policy import PlanChoice
from thalweg.training.compression_overlap import Timing
from thalweg.training.contention_monitor import Adjustment
from thalweg.training.rendezvous import MembershipChange
from thalweg.workloads import Job

STORE_NOTICE_SECONDS = 2 * MAX_STORE_POLL_SECONDS  # seconds until all have looked at the store
Progress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a job is trained, whatever the plan."""

    steps: int
    seed: int = 0  # of the model's first values and of the order of samples
    batch: int | None = None  # the job's own if None
    accumulate: int = 1  # backwards a step
    clip: float | None = None  # the largest norm of all gradients
    frozen: bool = False  # the model's first tensor isn't trained
    dtype: torch.dtype = torch.float32
    checkpoint: Path | None = None
    save_every: int | None = None  # steps; at the end only if None
    timeout: str = "10min"
    evaluate: bool = True
    evaluate_every: int | None = None  # steps; at the end only if None
    injection: SimulatedCompute | None = None  # sleeps in place of computation
    records: Path | None = None  # a folder for each rank's steps


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """What a worker has at the end. `losses` are of its own samples; `evaluations` are pairs of a
    step and the metric there, and take no part in `seconds`. Under a code a worker that was far
    behind may have left out `steps`."""

    model: nn.Module
    first_step: int
    steps: list[int]
    losses: list[float]
    seconds: list[float]
    evaluations: list[tuple[int, float]]
    metric: float | None
    deviation: float | None  # of its parameters from the mean of all, relative to that
    stopped: bool
    approximate: dict[int, float]  # steps, and the share of the batch that they have seen
    adjustments: list[Adjustment]  # of the groups, under plans that have them
    incidents: list[MembershipChange]  # who left and who came
    choices: list[PlanChoice]  # of plans, under auto
    timings: list[Timing]  # of the last steps, under plans that have common ones
    stragglers: list[tuple[int, list[Straggler]]]  # who was, from which step on
    tallies: dict[int, StepTotals]  # what steps took: of all ranks on the first, else of this one
    summary: str  # the same as a table
    peak_nbytes: int

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.model)


def train(
    job: Job,
    sync: str,
    recipe: Recipe,
    progress: Progress = lambda _: None,
    on_start: Callable[[Run], None] = lambda _: None,
) -> WorkerResult:
    """As a script would, with every option of `Recipe`; on all ranks of the run at once."""
    model = job.model(recipe.seed).to(recipe.dtype)
    if recipe.frozen:
        next(model.parameters()).requires_grad_(False)
    optimizer = job.optimizer(p for p in model.parameters() if p.requires_grad)
    run = attach(
        model,
        optimizer,
        sync=sync,
        data=job.data,
        batch=recipe.batch or job.batch,
        resume=recipe.checkpoint,
        seed=recipe.seed,
        cluster=_cluster(recipe),
        timeout=recipe.timeout,
        records=recipe.records,
    )
    on_start(run)
    first_step = run.step
    if recipe.steps < first_step:
        raise UsageError(
            f"the checkpoint is at step {first_step}, beyond {recipe.steps}", "give more steps"
        )
    pauses = _StepCallbacks(run, job, model, recipe)
    steps, losses, seconds = _steps(run, job, model, optimizer, recipe, progress, pauses)
    metric, deviation = None, None
    if recipe.checkpoint is not None:
        run.save(recipe.checkpoint)
    if recipe.evaluate:
        with run.consensus():
            metric = _judged(job, model)
            mean = flat(model)
        deviation = float((flat(model) - mean).norm() / mean.norm())
    timings = list(run.timings)
    run.close()
    return WorkerResult(
        model=model,
        first_step=first_step,
        steps=steps,
        losses=losses,
        seconds=seconds,
        evaluations=pauses.evaluated,
        metric=metric,
        deviation=deviation,
        stopped=run.stopping,
        approximate=dict(run.approximate),
        adjustments=list(run.adjustments),
        incidents=list(run.incidents),
        choices=list(run.choices),
        timings=timings,
        stragglers=[(step, list(stragglers)) for step, stragglers in run.latenesses],
        tallies=dict(run.tallies),
        summary=run.summary(),
        peak_nbytes=_peak_nbytes(),
    )


def _cluster(recipe: Recipe) -> Cluster | None:
    """The scenario's, unless a lab has told its own."""
    if recipe.injection is None or CLUSTER_VARIABLE in os.environ:
        return None
    return recipe.injection.cluster


def _steps(
    run: Run,
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    progress: Progress,
    pauses: _StepCallbacks,
) -> tuple[list[int], list[float], list[float]]:
    steps: list[int] = []
    losses: list[float] = []
    seconds: list[float] = []
    if run.step >= recipe.steps:
        return steps, losses, seconds
    for epoch in run.epochs(sys.maxsize):
        start = perf_counter()
        for number, batch in enumerate(run.batches(epoch), start=1):
            whole = number % recipe.accumulate == 0
            if (number - 1) % recipe.accumulate == 0:
                pauses.before_step()
            loss = _backward(run, job, model, tuple(batch), recipe, whole)
            if not whole:
                continue
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
            if run.step in steps[-1:]:
                continue  # it was broken off, and is redone
            steps.append(run.step)
            losses.append(loss)
            seconds.append(perf_counter() - start)
            progress({"step": run.step, "loss": loss, "seconds": seconds[-1]})
            pauses.after_step()
            if run.step >= recipe.steps:
                return steps, losses, seconds
            if recipe.checkpoint and recipe.save_every and run.step % recipe.save_every == 0:
                run.save(recipe.checkpoint)
            start = perf_counter()
        optimizer.zero_grad()  # of a step that the epoch's end cut short
    return steps, losses, seconds


class _StepCallbacks:
    """What a recipe puts between and into the steps: sleeps, and evaluations that don't count."""

    def __init__(self, run: Run, job: Job, model: nn.Module, recipe: Recipe) -> None:
        self._run = run
        self._every = recipe.evaluate_every
        self._sleeps: ComputeSleeper | None = None
        self._evaluations: Evaluations | None = None
        if recipe.injection is not None:
            shares = partial(_shares, recipe.injection.cluster, run.rank)
            self._sleeps = ComputeSleeper(recipe.injection, run.rank, lambda: shares(run.sync))
            self._sleeps.attach(model)
        if recipe.evaluate_every is not None:
            seconds = Duration.parse(recipe.timeout).seconds
            judge = partial(_judged, job, model)
            self._evaluations = Evaluations(run, judge, seconds)

    @property
    def evaluated(self) -> list[tuple[int, float]]:
        return [] if self._evaluations is None else self._evaluations.values

    def before_step(self) -> None:
        if self._sleeps is not None and not self._run.catching_up:
            self._sleeps.begin(self._run.step)

    def after_step(self) -> None:
        if self._evaluations and self._every and self._run.step % self._every == 0:
            self._evaluations.evaluate()


@cache
def _shares(cluster: Cluster, rank: int, sync: str) -> float:
    return shares_of(parse_plan(sync), cluster, rank)


def _judged(job: Job, model: nn.Module) -> float:
    return job.evaluate(_in_float32(job, model))


def _in_float32(job: Job, model: nn.Module) -> nn.Module:
    """Held-out samples are; the model's values may be narrower."""
    judged = job.model()
    judged.load_state_dict(model.state_dict())
    return judged


def _backward(
    run: Run, job: Job, model: nn.Module, batch: tuple[torch.Tensor, ...], recipe: Recipe, now: bool
) -> float:
    """One backward; the gradients travel if it is the step's last."""
    inputs = tuple(t.to(recipe.dtype) if t.is_floating_point() else t for t in batch)
    waiting: AbstractContextManager[None] = nullcontext() if now else run.no_sync()
    with waiting:  # round the forward too: there DDP decides
        losses = job.losses(model, inputs).float()
        torch.autograd.backward(run.mean(losses) / recipe.accumulate)
    return float(losses.detach().mean())


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().double().cpu().reshape(-1) for p in model.parameters()])


def fingerprint(model: nn.Module) -> str:
    """Equal for two models if and only if all their values are, bit for bit."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _peak_nbytes() -> int:
    """The most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Evaluations:
    """A model judged while it trains, such that judging costs the training nothing. `values` are
    pairs of a step and what the model was worth there, the same on all ranks.

    Rank 0 judges, inside a consensus, and the others wait for its word: cores are few. The word
    also says when to go on, a moment later for all at once, by the clock that processes of one
    machine share. So no step waits for a rank that was still busy with this, and the time of it can
    be left out on every rank.
    """

    def __init__(self, run: Run, judge: Callable[[], float], timeout: float) -> None:
        self.values: list[tuple[int, float]] = []
        self._run = run
        self._judge = judge
        self._timeout = timeout
        self._world = World.join(timeout)
        self._abort_flag = self._world.abort_flag()

    def evaluate(self) -> None:
        key = f"evaluated/{self._run.step}"
        with self._run.consensus():
            if self._run.rank == 0:
                value = self._judge()
                self._world.put(key, json.dumps([value, monotonic() + STORE_NOTICE_SECONDS]))
            told = self._world.wait_for(key, self._timeout, self._abort_flag)
        if told is None:
            raise RunError(
                f"rank 0 hasn't evaluated step {self._run.step} after {self._timeout:g} s",
                "evaluate fewer samples, or allow more time",
            )
        value, resume = json.loads(told)
        self.values.append((self._run.step, value))
        sleep(max(0.0, resume - monotonic()))

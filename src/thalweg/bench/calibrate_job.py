"""Calibration of a deployment and profile of a job there, by all of its workers.

The job is profiled in a few steps without synchronisation, so only computation is measured, with
all workers busy. The model that these steps train is discarded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from time import monotonic

import torch

from thalweg.bench.run_everywhere import (
    Deployment,
    NotedProgress,
    Report,
    Result,
    run_everywhere,
)
from thalweg.bench.simulated_compute import ComputeSleeper, SimulatedCompute
from thalweg.engine.engine import Engine
from thalweg.facts import Cluster, Situation, format_situation, parse_situation
from thalweg.launch.worker_group import SupervisorHook
from thalweg.members.world import World
from thalweg.plan import Choice
from thalweg.probing.calibration import Progress, calibrate
from thalweg.training import Run, attach
from thalweg.training.auto.profile import Profile, ProfileResult, merged
from thalweg.training.factory import trainable
from thalweg.workloads import Job, describe

UNSYNCHRONIZED_PLAN = "local_sgd(every=1000000)"
CALIBRATION_JOB_STEPS = 12
CALIBRATION_SLACK_SECONDS = 60.0  # beyond the expected time
CALIBRATION_TIMEOUT_SECONDS = 3600.0  # for the whole calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCalibration:
    """A calibrated situation, whose hosts straggle as they did during the calibration."""

    situation: Situation
    spread: float  # relative standard deviation of a step's compute time
    seconds: float  # duration of the calibration


def calibrate_at(
    deployment: Deployment,
    job: Job,
    declared: Cluster | None,
    codecs: Sequence[Choice],
    progress: NotedProgress,
    *,
    steps: int = CALIBRATION_JOB_STEPS,
    injection: SimulatedCompute | None = None,
    director: SupervisorHook | None = None,
) -> JobCalibration | None:
    """The calibration of a deployment; None if this process is a launched rank other than 0.

    `director` applies events to the deployment's workers.
    """

    def work(rank: int, report: Report) -> Result:
        found = _calibrate(job, declared, codecs, report, steps, injection)
        return found if rank == 0 else {}

    packed = run_everywhere(
        deployment,
        work,
        lambda what, done, total: progress(done, total or done + 1, what),
        timeout=CALIBRATION_TIMEOUT_SECONDS,
        director=director,
    )[0]
    if not packed:
        return None
    return JobCalibration(situation=parse_situation(packed.pop("texts")), **packed)


def _calibrate(
    job: Job,
    declared: Cluster | None,
    codecs: Sequence[Choice],
    progress: Progress,
    steps: int,
    injection: SimulatedCompute | None,
) -> Result:
    """Calibrate the network and profile the job. Every rank of a run calls this at the same time,
    and all get the same result: a `JobCalibration` with its situation as texts."""
    start = monotonic()
    world = World.join(CALIBRATION_SLACK_SECONDS)
    abort_flag = world.abort_flag()
    engine = Engine(world.transport(), abort_flag, CALIBRATION_SLACK_SECONDS)
    try:
        measured = calibrate(
            world,
            abort_flag,
            engine,
            declared,
            describe(name_of(job), job.model()),
            codecs=codecs,
            native=True,
            progress=progress,
        )
        world.leave(CALIBRATION_SLACK_SECONDS, abort_flag)
    finally:
        engine.close()
    progress("steps", 0, steps)
    profiled = _profile(job, steps, injection)
    progress("steps", steps, steps)
    cluster = profiled.with_straggler_delays(measured.cluster)
    situation = replace(measured, cluster=cluster, workload=profiled.workload)
    return {
        "texts": format_situation(situation),
        "spread": profiled.spread,
        "seconds": monotonic() - start,
    }


def _profile(job: Job, steps: int, injection: SimulatedCompute | None) -> ProfileResult:
    """Profile steps of the job. Every rank of a run calls this at the same time, and all get the
    same result."""
    model = job.model()
    optimizer = job.optimizer(p for p in model.parameters() if p.requires_grad)
    run = attach(model, optimizer, plan=UNSYNCHRONIZED_PLAN, data=job.data, batch=job.batch)
    try:
        with closing(Profile(trainable(model), optimizer)) as profile:
            sleeper = None if injection is None else ComputeSleeper(injection, run.rank, model)
            epochs = run.epochs(sys.maxsize)
            for batch in (batch for epoch in epochs for batch in run.batches(epoch)):
                if sleeper is not None:
                    sleeper.begin(run.step)
                torch.autograd.backward(run.mean(job.losses(model, tuple(batch))))
                optimizer.step()
                optimizer.zero_grad()
                if len(profile) == steps:
                    break
        table = _all_gather(run, profile.seconds())
    finally:
        run.close()
    return merged(name_of(job), profile.tensors, table.numpy())


def _all_gather(run: Run, row: Sequence[float]) -> torch.Tensor:
    """The table of the rows of all ranks, as a mean: every rank contributes its row, times the
    number of ranks, in a table of zeros."""
    table = torch.zeros(run.size, len(row), dtype=torch.float64)
    table[run.rank] = run.size * torch.tensor(row, dtype=torch.float64)
    run.all_reduce_mean([table])
    return table


def name_of(job: Job) -> str:
    """The job's name for files: `synthetic(params=2.5M)` becomes `synthetic-params-2-5M`."""
    return re.sub(r"[^A-Za-z0-9]+", "-", job.name).strip("-") or "job"

"""A run that is broken on purpose, from the drawing of its faults to the verdict."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

from thalweg.catalog import parse_plan
from thalweg.chaos.checks.invariants import violations
from thalweg.chaos.disk import Disk
from thalweg.chaos.exact_job import CHAOS_BATCH_SAMPLES, expected_states, samples
from thalweg.chaos.fault import LINK_FAULTS, FaultKind
from thalweg.chaos.fault_actions import FaultActions
from thalweg.chaos.fault_sampler import draw_faults
from thalweg.chaos.history import History, Lost, Violation
from thalweg.chaos.injector import MAX_RANK_LAG_STEPS, FaultInjector
from thalweg.chaos.recovery_times import FaultTimes, fault_times
from thalweg.chaos.worker import ChaosTask, work
from thalweg.errors import ThalwegError, UsageError
from thalweg.facts import Cluster
from thalweg.launch.place import HERE
from thalweg.launch.supervisor import run_workers
from thalweg.launch.worker_group import OnLine

if TYPE_CHECKING:
    from thalweg.lab import Lab

RECOVERY_TIMEOUT_SECONDS = 60.0  # seconds in which a run must be well again, or it counts as lost
Progress = Callable[[int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosConfig:
    """What a run is to go through. `bound` are the seconds within which it must go on, `hold` those
    that a fault lasts, if that isn't drawn."""

    sync: str
    seed: int
    faults: int
    kinds: tuple[FaultKind, ...]
    bound: float
    hold: float | None = None

    def __post_init__(self) -> None:
        parse_plan(self.sync)

    @property
    def name(self) -> str:
        plain = re.sub(r"[^a-z0-9]+", "-", self.sync.lower()).strip("-")
        return f"{plain}-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosResult:
    config: ChaosConfig
    fault_times: list[FaultTimes]
    violations: list[Violation]
    steps: int
    commits: int
    seconds: float
    history: Path


def run_chaos(
    config: ChaosConfig,
    cluster: Cluster,
    lab: Lab | None,
    out: Path,
    progress: Progress,
    on_line: OnLine,
) -> ChaosResult:
    """In this lab, or with local workers; what is written goes into a folder of `out`."""
    if lab is None and set(config.kinds) & set(LINK_FAULTS):
        raise UsageError("links of local workers can't be broken", "give --lab RxH, or other kinds")
    folder = out / config.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    faults = draw_faults(config.seed, cluster, config.faults, config.kinds, config.hold)
    disk = Disk() if {"disk", "corrupt"} & set(config.kinds) else None
    began = time()
    samples()  # once, for all forks
    try:
        with (folder / "history.jsonl").open("w", encoding="utf-8") as file:
            history = History(faults, file)
            task = ChaosTask(
                sync=config.sync,
                seed=config.seed,
                folder=folder,
                disk=None if disk is None else disk.checkpoints,
            )
            conductor = FaultInjector(
                cluster.workers,
                faults,
                FaultActions(lab, disk, history.add),
                history,
                task.stop,
                limit=RECOVERY_TIMEOUT_SECONDS,
                behind=MAX_RANK_LAG_STEPS + (parse_plan(config.sync).cadence.staleness or 0),
                progress=progress,
            )
            try:
                run_workers(
                    cluster.workers,
                    partial(work, task),
                    timeout=None,
                    place=HERE if lab is None else lab.place,
                    director=conductor,
                    on_message=conductor.on_message,
                    on_line=on_line,
                    debug=True,
                )
            except ThalwegError as error:
                history.add(Lost(time=time(), reason=str(error)))
    finally:
        if disk is not None:
            disk.close()
        if lab is not None:
            lab.restore()
    effects = fault_times(history, cluster)
    return ChaosResult(
        config=config,
        fault_times=effects,
        violations=violations(
            history,
            effects,
            sync=config.sync,
            batch=CHAOS_BATCH_SAMPLES,
            foretold=expected_states(config.seed),
            bound=config.bound,
        ),
        steps=max((commit.step for commit in history.commits), default=0),
        commits=len(history.commits),
        seconds=time() - began,
        history=folder / "history.jsonl",
    )

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
from thalweg.chaos.exact_job import BATCH, foretold, samples
from thalweg.chaos.fault import OF_LINKS, Kind
from thalweg.chaos.fault_actions import Means
from thalweg.chaos.fault_sampler import draw
from thalweg.chaos.history import History, Lost, Violation
from thalweg.chaos.injector import BEHIND, Conductor
from thalweg.chaos.recovery_times import Felt, felt
from thalweg.chaos.worker import Task, work
from thalweg.errors import ThalwegError, UsageError
from thalweg.facts import Cluster
from thalweg.launch.place import HERE
from thalweg.launch.supervisor import run_workers
from thalweg.launch.worker_group import OnLine

if TYPE_CHECKING:
    from thalweg.lab import Lab

LIMIT = 60.0  # seconds in which a run must be well again, or it counts as lost
Progress = Callable[[int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordeal:
    """What a run is to go through. `bound` are the seconds within which it must go on, `hold` those
    that a fault lasts, if that isn't drawn."""

    sync: str
    seed: int
    faults: int
    kinds: tuple[Kind, ...]
    bound: float
    hold: float | None = None

    def __post_init__(self) -> None:
        parse_plan(self.sync)

    @property
    def name(self) -> str:
        plain = re.sub(r"[^a-z0-9]+", "-", self.sync.lower()).strip("-")
        return f"{plain}-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    ordeal: Ordeal
    felt: list[Felt]
    violations: list[Violation]
    steps: int
    commits: int
    seconds: float
    history: Path


def undergo(
    ordeal: Ordeal,
    cluster: Cluster,
    lab: Lab | None,
    out: Path,
    progress: Progress,
    on_line: OnLine,
) -> Outcome:
    """In this lab, or with local workers; what is written goes into a folder of `out`."""
    if lab is None and set(ordeal.kinds) & set(OF_LINKS):
        raise UsageError("links of local workers can't be broken", "give --lab RxH, or other kinds")
    folder = out / ordeal.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    faults = draw(ordeal.seed, cluster, ordeal.faults, ordeal.kinds, ordeal.hold)
    disk = Disk() if {"disk", "corrupt"} & set(ordeal.kinds) else None
    began = time()
    samples()  # once, for all forks
    try:
        with (folder / "history.jsonl").open("w", encoding="utf-8") as file:
            history = History(faults, file)
            task = Task(
                sync=ordeal.sync,
                seed=ordeal.seed,
                folder=folder,
                disk=None if disk is None else disk.checkpoints,
            )
            conductor = Conductor(
                cluster.workers,
                faults,
                Means(lab, disk, history.add),
                history,
                task.stop,
                limit=LIMIT,
                behind=BEHIND + (parse_plan(ordeal.sync).cadence.staleness or 0),
                progress=progress,
            )
            try:
                run_workers(
                    cluster.workers,
                    partial(work, task),
                    timeout=None,
                    place=HERE if lab is None else lab.place,
                    director=conductor,
                    on_message=conductor.hear,
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
    effects = felt(history, cluster)
    return Outcome(
        ordeal=ordeal,
        felt=effects,
        violations=violations(
            history,
            effects,
            sync=ordeal.sync,
            batch=BATCH,
            foretold=foretold(ordeal.seed),
            bound=ordeal.bound,
        ),
        steps=max((commit.step for commit in history.commits), default=0),
        commits=len(history.commits),
        seconds=time() - began,
        history=folder / "history.jsonl",
    )

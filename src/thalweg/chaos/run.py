"""One run with fault injection, from the draw of its faults to the checks of its history."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import time
from typing import TYPE_CHECKING, Any

from thalweg.catalog import parse_plan
from thalweg.chaos.checks.invariants import violations
from thalweg.chaos.disk import Disk
from thalweg.chaos.exact_job import CHAOS_BATCH_SAMPLES, expected_states, samples
from thalweg.chaos.fault import FAULT_KINDS, LINK_FAULTS, FaultKind, draw_faults
from thalweg.chaos.history import History, Lost, Violation
from thalweg.chaos.injector import MAX_RANK_LAG_STEPS, FaultInjector
from thalweg.chaos.recovery_times import FaultTimes, fault_times
from thalweg.chaos.worker import STOP_FILE_NAME, work
from thalweg.errors import ThalwegError, UsageError
from thalweg.facts import Cluster, grouped
from thalweg.launch.place import HERE
from thalweg.launch.supervisor import run_workers
from thalweg.launch.worker_group import OnLine

if TYPE_CHECKING:
    from thalweg.lab import Lab

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosConfig:
    """The plan and the faults of one run."""

    sync: str
    seed: int
    faults: int
    kinds: tuple[FaultKind, ...]
    recovery_limit: float  # seconds within which training must continue after a fault
    hold: float | None = None  # seconds that each fault lasts; drawn if None

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
    progress: Callable[[int, str], None],
    on_line: OnLine,
) -> ChaosResult:
    """Run and check a job in this lab, or with local workers; its files go to a folder of `out`."""
    if lab is None and set(config.kinds) & set(LINK_FAULTS):
        raise UsageError("links of local workers can't be broken", "give --lab RxH, or other kinds")
    folder = out / config.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    faults = draw_faults(config.seed, cluster, config.faults, config.kinds, config.hold)
    disk = Disk() if {"disk", "corrupt"} & set(config.kinds) else None
    start = time()
    samples()  # makes and caches the data set, before workers are forked, which share it
    try:
        with (folder / "history.jsonl").open("w", encoding="utf-8") as file:
            history = History(faults, file)
            injector = FaultInjector(
                cluster.workers,
                history,
                folder / STOP_FILE_NAME,
                lab=lab,
                disk=disk,
                max_lag=MAX_RANK_LAG_STEPS + (parse_plan(config.sync).cadence.staleness or 0),
                progress=progress,
            )
            try:
                run_workers(
                    cluster.workers,
                    partial(
                        work,
                        sync=config.sync,
                        seed=config.seed,
                        folder=folder,
                        disk=None if disk is None else disk.checkpoints,
                    ),
                    timeout=None,
                    place=HERE if lab is None else lab.place,
                    director=injector,
                    on_message=injector.on_message,
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
    times = fault_times(history, cluster)
    return ChaosResult(
        config=config,
        fault_times=times,
        violations=violations(
            history,
            times,
            sync=config.sync,
            batch=CHAOS_BATCH_SAMPLES,
            expected=expected_states(config.seed),
            recovery_limit=config.recovery_limit,
        ),
        steps=max((commit.step for commit in history.commits), default=0),
        commits=len(history.commits),
        seconds=time() - start,
        history=folder / "history.jsonl",
    )


def run_rows(results: Iterable[ChaosResult]) -> list[Row]:
    """A row for each run: its plan (`sync`), the numbers of its faults, of the steps of the run and
    of all steps of all ranks (`commits`), its duration in seconds, violations and history file."""
    return [
        {
            "sync": result.config.sync,
            "seed": result.config.seed,
            "faults": len(result.fault_times),
            "steps": result.steps,
            "commits": result.commits,
            "seconds": result.seconds,
            "violations": [str(violation) for violation in result.violations],
            "history": str(result.history),
        }
        for result in results
    ]


def fault_rows(results: Iterable[ChaosResult]) -> list[Row]:
    """A row for each fault: its number in the run, what was drawn (see `Fault`), and in seconds the
    time to its detection, the stall of the other ranks (`went_on`), the time from its end until the
    ranks that were hit rejoined (`back`), and the time from its beginning to its recovery."""
    return [
        {
            "sync": result.config.sync,
            "seed": result.config.seed,
            "fault": times.fault.number,
            **{
                key: getattr(times.fault, key)
                for key in ("kind", "rank", "rack", "peer", "direction", "hold", "overlaps")
            },
            "detected": times.detected,
            "went_on": times.stall_seconds,
            "back": times.rejoin_seconds,
            "recovered": None if times.recovered is None else times.recovered - times.injected,
            "violations": [str(v) for v in result.violations if v.fault == times.fault.number],
        }
        for result in results
        for times in result.fault_times
    ]


def kind_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of `fault_rows`, summarized for each plan and each kind of fault: the times are
    their median and maximum."""

    def span(faults: Sequence[Row], key: str) -> tuple[float, float] | None:
        values = [row[key] for row in faults if row[key] is not None]
        return (median(values), max(values)) if values else None

    by_kind = grouped(((row["sync"], row["kind"]), row) for row in rows)
    return [
        {
            "sync": sync,
            "kind": kind,
            "faults": len(faults),
            **{key: span(faults, key) for key in ("detected", "went_on", "back")},
            "violations": sum(len(row["violations"]) for row in faults),
        }
        for sync in dict.fromkeys(row["sync"] for row in rows)
        for kind in FAULT_KINDS
        if (faults := by_kind.get((sync, kind)))
    ]

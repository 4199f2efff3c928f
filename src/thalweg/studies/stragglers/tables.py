"""The tables of the straggler study: the trials of each, and a row for every trial.

    held      the requested setting
    delays    the same with delays of 0, 0.5 and 2 s: the cost of stragglers, and of the scheme
              without any
    compute   the same with free computation, and with 200 ms over all data
    pauses    the same with workers that are away, and CodedReduce with more redundancy as well
    surface   message size x delay x fraction of stragglers

A trial that several tables need is run once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from thalweg.bench.run_everywhere import Deployment, NotedProgress
from thalweg.errors import LabError, ThalwegError
from thalweg.facts import Rate, about
from thalweg.studies.stragglers.config import SCHEMES, STUDY_TABLES, Softmax, StragglerTrial
from thalweg.studies.stragglers.trial_run import PreparedTrial, run_trial

DELAY_TABLE_SECONDS = (0.0, 0.5, 2.0)
COMPUTE_TABLE_SECONDS = (0.0, 0.2)
SURFACE_MESSAGE_BYTES = (40_000, 200_000, 1_000_000)
SURFACE_DELAY_SECONDS = (0.5, 2.0)
SURFACE_STRAGGLER_FRACTIONS = (0.02, 0.05, 0.1)

Row = dict[str, Any]


def trials_of(table: str, asked: StragglerTrial) -> list[StragglerTrial]:
    """The trials of a table; `asked` has everything but the scheme."""
    delays = sorted({*DELAY_TABLE_SECONDS, asked.delay})
    computes = sorted({*COMPUTE_TABLE_SECONDS, asked.compute})
    settings = {
        "held": [asked],
        "delays": [replace(asked, delay=delay) for delay in delays],
        "compute": [replace(asked, compute=compute) for compute in computes],
        "pauses": [replace(asked, way="away")],
        "surface": [
            replace(asked, elements=nbytes // 4, delay=delay, late=late)
            for nbytes in SURFACE_MESSAGE_BYTES
            for delay in SURFACE_DELAY_SECONDS
            for late in SURFACE_STRAGGLER_FRACTIONS
        ],
    }[table]
    trials = [replace(setting, scheme=scheme) for setting in settings for scheme in SCHEMES]
    stronger = asked.tree.more_redundant()
    if table == "pauses" and stronger != asked.tree:
        trials.append(replace(settings[0], scheme="cr", tree=stronger))
    return trials


def run_straggler_study(
    asked: StragglerTrial,
    tables: Sequence[str],
    deployment: Deployment,
    rate: Rate,
    on_progress: NotedProgress,
) -> dict[str, list[Row]]:
    """The rows of each table."""
    wanted = {name: trials_of(name, asked) for name in STUDY_TABLES if name in tables}
    todo = list(dict.fromkeys(trial for trials in wanted.values() for trial in trials))
    rows: dict[StragglerTrial, Row] = {}
    problem: Softmax | None = None
    for number, trial in enumerate(todo):
        show = partial(on_progress, number, len(todo))
        show(f"{trial.scheme}, {describe_trial(trial)}")
        if problem is None or problem.elements != trial.elements:
            problem = None  # frees its memory first
            problem = Softmax.for_workers(trial.workers, trial.elements, trial.seed)
        try:
            rows[trial] = _measured(trial, deployment, problem, rate, show)
        except LabError:
            raise
        except ThalwegError as error:
            rows[trial] = row_of_failure(trial, rate, str(error))
    on_progress(len(todo), len(todo), "")
    return {
        name: compared(name, [rows[trial] for trial in trials]) for name, trials in wanted.items()
    }


def _measured(
    trial: StragglerTrial,
    deployment: Deployment,
    problem: Softmax,
    rate: Rate,
    show: Callable[[str], None],
) -> Row:
    """Run one trial; its messages are freed on return, before the next trial makes its own."""

    def progress(done: int, total: int) -> None:
        show(f"{trial.scheme} {done}/{total}, {describe_trial(trial)}")

    prepared = PreparedTrial.of(trial, deployment, problem)
    return row_of(prepared, run_trial(prepared, deployment, progress), rate)


def describe_trial(trial: StragglerTrial) -> str:
    """A short description for the line of a progress bar."""
    size, delay = about(4 * trial.elements, "B"), about(trial.delay, "s")
    return f"{size}, {trial.late:.0%} {trial.way} {delay}"


def row_of(prepared: PreparedTrial, outcome: Row, rate: Rate) -> Row:
    """The row of a trial, from the times of its iterations and those with a wrong gradient."""
    trial, seconds = prepared.trial, np.array(outcome["seconds"])
    held = trial.way == "held"
    beyond = trial.beyond(prepared.allocation, len(seconds)) if held else None
    return {
        **_setting(trial, rate),
        "mean": float(seconds.mean()),
        **{f"p{p}": float(np.percentile(seconds, p)) for p in (5, 50, 95, 99)},
        "exact": not outcome["wrong"],
        "wrong": len(outcome["wrong"]),
        "iterations": len(seconds),
        "load": float(max(prepared.allocation.loads.values())),
        "beyond": beyond,
        "waits": None if beyond is None else beyond / len(seconds) * trial.delay,
        "error": None,
        "seconds": outcome["seconds"],
    }


def row_of_failure(trial: StragglerTrial, rate: Rate, error: str) -> Row:
    figures = ("mean", "p5", "p50", "p95", "p99", "wrong", "iterations", "load", "beyond", "waits")
    return {
        **_setting(trial, rate),
        **dict.fromkeys(figures),
        "exact": False,
        "error": error,
        "seconds": [],
    }


def _setting(trial: StragglerTrial, rate: Rate) -> Row:
    return {
        "scheme": trial.scheme,
        "stragglers": trial.stragglers,
        "bytes": 4 * trial.elements,
        "late": trial.late,
        "delay": trial.delay,
        "compute": trial.compute,
        "way": trial.way,
        "bound": trial.link_seconds(rate),
    }


def compared(table: str, rows: Sequence[Row]) -> list[Row]:
    """The rows with the speed-up of CodedReduce in the same setting, also of its row with more
    redundancy, and with the slowdown by stragglers where there is a row without any."""
    found = []
    for row in rows:
        coded = _alike(rows, row, scheme="cr")
        row = {**row, "cr_speedup": _over(row, coded[0], "mean")}
        if len(coded) > 1:
            row["stronger_cr_speedup"] = _over(row, coded[1], "mean")
        if table == "delays":
            [baseline] = _alike(rows, row, scheme=row["scheme"], delay=0.0)
            row["mean_vs_none_late"] = _over(row, baseline, "mean")
            row["p95_vs_none_late"] = _over(row, baseline, "p95")
        found.append(row)
    return found


def _alike(rows: Sequence[Row], like: Row, **other: Any) -> list[Row]:
    """The rows of the same setting, except for `other`."""
    keys = ("bytes", "late", "delay", "compute", "way")
    wanted = {**{key: like[key] for key in keys}, **other}
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _over(row: Row, other: Row, figure: str) -> float | None:
    if row[figure] is None or other[figure] is None:
        return None
    return float(row[figure] / other[figure])

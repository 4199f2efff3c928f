"""The current activity of each rank, and the detection of hung ranks from it.

A rank's training thread sets the phase and step that it has reached. The rank's monitor publishes
them in the store, again and again, in a report. Of its fields this module reads

    number     grows by one with each report
    activity   an `ActivityEntries`
    steps      the steps completed lately: lists of the step, its duration in seconds, and more
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, TypedDict

import torch

from thalweg.facts import Cluster, about
from thalweg.transports.store_client import Store

OBSERVED_KEY = "observed"  # store key prefix of the ranks' reports
LIBRARY_PATHS = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for folder in (
        Path(__file__).parents[1],
        Path(torch.__file__).parent,
        sysconfig.get_path("stdlib"),
    )
)
WAITING_PHASE = "waiting for averages"
MIN_LONG_PHASE_SECONDS = 10.0
LONG_PHASE_STEP_FACTOR = 10.0  # multiple of the median step time
STEP_HISTORY_COUNT = 50


class ActivityEntries(TypedDict):
    """A phase that a training thread was in when its rank reported."""

    phase: str
    step: int
    lasts: float  # seconds since the begin of the phase
    where: str  # the line of the script, as `script_line` has it; empty in a short phase


class Activity:
    """The activity of the thread that creates this object."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._now = ("starting", 0, monotonic())

    def enter_phase(self, phase: str, step: int) -> None:
        self._now = (phase, step, monotonic())

    def entries(self, locate_after: float) -> ActivityEntries:
        """The current phase; if it lasts for more than `locate_after` seconds, with the line of the
        script."""
        phase, step, since = self._now
        lasts = monotonic() - since
        where = script_line(self._thread) if lasts > locate_after else ""
        return {"phase": phase, "step": step, "lasts": round(lasts, 2), "where": where}


def activity_text(entries: ActivityEntries) -> str:
    where = f", at {entries['where']}" if entries["where"] else ""
    lasts = about(entries["lasts"], "s")
    return f"in {entries['phase']} of step {entries['step']} for {lasts}{where}"


def script_line(thread: int) -> str:
    """The thread's innermost line outside torch, Python, this package and generated code such as
    `<string>`, as `train.py:31 (collate)`. Without such a line it is the innermost of all; empty if
    the thread has ended."""
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(("<", *LIBRARY_PATHS)):
        frame = frame.f_back
    shown = frame or innermost
    if shown is None:
        return ""
    code = shown.f_code
    return f"{Path(code.co_filename).name}:{shown.f_lineno} ({code.co_name})"


def key_of(rank: int, epoch: int = 1) -> str:
    """The store key of a rank's report. The first membership epoch uses the store of the run, and
    each later one a namespace in it (`World.with_members`)."""
    return f"{'' if epoch == 1 else f'formed/{epoch}/'}{OBSERVED_KEY}/{rank}"


def last_seen(store: Store, key: str) -> str:
    """The activity that a rank last reported; empty if there is none."""
    with suppress(RuntimeError, ValueError, KeyError):  # torch's DistError is a RuntimeError
        if store.check([key]):
            return activity_text(json.loads(store.get(key))["activity"])
    return ""


class HangDetector:
    """Detects hung ranks from the reports of all ranks; the first member has one. If a rank waits
    long for averages, the ranks that don't wait are the cause: they compute, load data, or no
    longer report. Under plans without waiting no rank is blocked.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._last_reports: dict[int, tuple[int, float]] = {}  # number, time of arrival
        self._step_seconds: deque[float] = deque(maxlen=STEP_HISTORY_COUNT)
        self._logged: dict[int, int] = {}  # the step of each rank's last logged hang

    @property
    def hang_seconds(self) -> float:
        """The duration in seconds from which on a phase, or a rank's silence, counts as a hang."""
        median_seconds = median(self._step_seconds) if self._step_seconds else 0.0
        return max(MIN_LONG_PHASE_SECONDS, LONG_PHASE_STEP_FACTOR * median_seconds)

    def find_hung(self, reports: Mapping[int, Mapping[str, Any]]) -> list[str]:
        """Return a log line for each hung rank that wasn't logged at its current step yet."""
        now = monotonic()
        for rank, report in reports.items():
            if self._last_reports.get(rank, (-1, 0.0))[0] != report["number"]:
                self._last_reports[rank] = report["number"], now
                self._step_seconds.extend(step[1] for step in report["steps"][-1:])
        waits = [report["activity"] for report in reports.values() if _waits(report)]
        longest = max(waits, key=lambda activity: float(activity["lasts"]), default=None)
        if longest is None or longest["lasts"] < self.hang_seconds:
            return []
        lines = []
        for rank, report in reports.items():
            step, lasts = report["activity"]["step"], report["activity"]["lasts"]
            silence = now - self._last_reports[rank][1]
            is_busy = not _waits(report) and lasts >= longest["lasts"] / 2
            if step > longest["step"] or self._logged.get(rank) == step:
                continue  # the rank has finished the step that others wait for, or was logged
            if is_busy or silence >= self.hang_seconds:
                self._logged[rank] = step
                doing = activity_text(report["activity"])
                if silence >= self.hang_seconds:
                    doing = f"silent for {about(silence, 's')}, last seen {doing}"
                lines.append(
                    f"rank {rank} on {self._cluster.host(rank).name} blocks the other ranks "
                    f"({about(longest['lasts'], 's')}): {doing}"
                )
        return lines


def _waits(report: Mapping[str, Any]) -> bool:
    return bool(report["activity"]["phase"] == WAITING_PHASE)

"""The current activity of each rank, and the detection of hung ranks from it.

A rank's training thread sets the phase and step that it has reached. A later report adds for how
long it has been there and, from the thread's stack, at which line of the script.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch

from thalweg.facts import Cluster, about
from thalweg.transports.store_client import Store

OBSERVED_KEY = "observed"  # store key prefix of the ranks' reports
LIBRARY_PATHS = tuple(
    str(Path(folder).resolve())
    for folder in (
        Path(__file__).parents[1],
        Path(torch.__file__).parent,
        sysconfig.get_path("stdlib"),
    )
)
WAITING_PHASE = "waiting for averages"
MIN_LONG_PHASE_SECONDS = 10.0
LONG_PHASE_STEP_FACTOR = 10.0  # of the median step time
STEP_HISTORY_COUNT = 50


class Activity:
    """The activity of the thread that creates this object."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._now = ("starting", 0, monotonic())

    def enter_phase(self, phase: str, step: int) -> None:
        self._now = (phase, step, monotonic())

    def entries(self, long: float) -> dict[str, Any]:
        """The current phase, step and duration; after `long` seconds also the script's line."""
        phase, step, since = self._now
        lasts = monotonic() - since
        where = place_in_script(self._thread) if lasts > long else ""
        return {"phase": phase, "step": step, "lasts": round(lasts, 2), "where": where}


def activity_text(entries: Mapping[str, Any]) -> str:
    where = f", at {entries['where']}" if entries["where"] else ""
    lasts = about(entries["lasts"], "s")
    return f"in {entries['phase']} of step {entries['step']} for {lasts}{where}"


def place_in_script(thread: int) -> str:
    """The thread's innermost line outside torch, Python and this package, as `train.py:31
    (collate)`; without such a line, the innermost of all."""
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(("<", *LIBRARY_PATHS)):
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return ""
    code = found.f_code
    return f"{Path(code.co_filename).name}:{found.f_lineno} ({code.co_name})"


def key_of(rank: int, epoch: int = 1) -> str:
    """The store key of a rank's report; each epoch but the first has its own namespace."""
    return f"{'' if epoch == 1 else f'formed/{epoch}/'}{OBSERVED_KEY}/{rank}"


def last_seen(store: Store, key: str) -> str:
    """The activity that a rank last reported; empty if there is none."""
    with suppress(RuntimeError, ValueError, KeyError):  # torch's DistError is a RuntimeError
        if store.check([key]):
            return activity_text(json.loads(store.get(key))["activity"])
    return ""


class HangDetector:
    """Detects hung ranks on the first member, from the reports of all ranks. If a rank waits long
    for averages, the ranks that don't wait are the cause: they compute, load data, or no longer
    report. Under plans without waiting no rank is blocked.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._last_reports: dict[int, tuple[int, float]] = {}  # number and time of arrival
        self._step_seconds: deque[float] = deque(maxlen=STEP_HISTORY_COUNT)
        self._logged: dict[int, int] = {}  # rank and the step of its hang

    @property
    def long(self) -> float:
        """The duration of a phase in seconds from which on it counts as a hang."""
        usual = median(self._step_seconds) if self._step_seconds else 0.0
        return max(MIN_LONG_PHASE_SECONDS, LONG_PHASE_STEP_FACTOR * usual)

    def find_hung(self, reports: Mapping[int, Mapping[str, Any]]) -> list[str]:
        """A log line for each rank that is newly found hung."""
        now = monotonic()
        for rank, entries in reports.items():
            if self._last_reports.get(rank, (-1, 0.0))[0] != entries["number"]:
                self._last_reports[rank] = entries["number"], now
                self._step_seconds.extend(step[1] for step in entries["steps"][-1:])
        waits = [entries["activity"] for entries in reports.values() if _waits(entries)]
        longest = max(waits, key=lambda activity: float(activity["lasts"]), default=None)
        if longest is None or longest["lasts"] < self.long:
            return []
        lines = []
        for rank, entries in reports.items():
            step, lasts = entries["activity"]["step"], entries["activity"]["lasts"]
            silent = now - self._last_reports[rank][1]
            busy = not _waits(entries) and lasts >= longest["lasts"] / 2
            if step > longest["step"] or self._logged.get(rank) == step:
                continue  # it has finished that step, or was logged
            if busy or silent >= self.long:
                self._logged[rank] = step
                doing = activity_text(entries["activity"])
                if silent >= self.long:
                    doing = f"silent for {about(silent, 's')}, last seen {doing}"
                lines.append(
                    f"rank {rank} on {self._cluster.host(rank).name} blocks the other ranks "
                    f"({about(longest['lasts'], 's')}): {doing}"
                )
        return lines


def _waits(entries: Mapping[str, Any]) -> bool:
    return bool(entries["activity"]["phase"] == WAITING_PHASE)

"""What a rank is doing now, for whoever waits for it; and who holds up the others.

A rank's training thread says which phase of which step it has come to. Who asks later also learns
for how long it has been there, and in which line of the script, from the stack of that thread.
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
from types import FrameType
from typing import Any

import torch

from thalweg.facts import Cluster, about
from thalweg.transports.store_client import Store

OBSERVED_KEY = "observed"  # in the store, of each rank
LIBRARY_PATHS = tuple(
    str(Path(folder).resolve())
    for folder in (
        Path(__file__).parents[1],
        Path(torch.__file__).parent,
        sysconfig.get_path("stdlib"),
    )
)
WAITING_PHASE = "waiting for averages"
MIN_LONG_PHASE_SECONDS, LONG_PHASE_STEP_FACTOR = (
    10.0,
    10.0,
)  # seconds, and usual steps, that are long
STEP_HISTORY_COUNT = 50  # steps


class Activity:
    """Of the thread that makes it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._now = ("starting", 0, monotonic())

    def enter_phase(self, phase: str, step: int) -> None:
        self._now = (phase, step, monotonic())

    def entries(self, long: float) -> dict[str, Any]:
        """With the line of the script, if the phase has lasted for so many seconds."""
        phase, step, since = self._now
        lasts = monotonic() - since
        where = place_in_script(self._thread) if lasts > long else ""
        return {"phase": phase, "step": step, "lasts": round(lasts, 2), "where": where}


def activity_text(entries: Mapping[str, Any]) -> str:
    where = f", at {entries['where']}" if entries["where"] else ""
    lasts = about(entries["lasts"], "s")
    return f"in {entries['phase']} of step {entries['step']} for {lasts}{where}"


def place_in_script(thread: int) -> str:
    """`train.py:31 (collate)`: the innermost line that isn't torch's, Python's or ours; or simply
    the innermost."""
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return ""
    code = found.f_code
    return f"{Path(code.co_filename).name}:{found.f_lineno} ({code.co_name})"


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith("<") or name.startswith(LIBRARY_PATHS)


def key_of(rank: int, formation: int = 1) -> str:
    """Each formation but the first has a part of the run's store to itself."""
    return (
        f"{OBSERVED_KEY}/{rank}" if formation == 1 else f"formed/{formation}/{OBSERVED_KEY}/{rank}"
    )


def last_seen(store: Store, key: str) -> str:
    """What a rank has last told of itself; empty if nothing."""
    with suppress(RuntimeError, ValueError, KeyError):  # torch's DistError is a RuntimeError
        if store.check([key]):
            return activity_text(json.loads(store.get(key))["activity"])
    return ""


class HangDetector:
    """Who holds up the others, as the first member sees it from what all tell: not one of those
    that wait. When a rank waits for averages for long, those who don't wait are the cause: they
    compute, or load, or say nothing any more. Under plans that wait for nobody, nobody is held up.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._last_reports: dict[int, tuple[int, float]] = {}  # the last number, and when it came
        self._steps: deque[float] = deque(maxlen=STEP_HISTORY_COUNT)
        self._named: dict[int, int] = {}  # at which step

    @property
    def long(self) -> float:
        """Seconds."""
        usual = median(self._steps) if self._steps else 0.0
        return max(MIN_LONG_PHASE_SECONDS, LONG_PHASE_STEP_FACTOR * usual)

    def find_hung(self, heard: Mapping[int, Mapping[str, Any]]) -> list[str]:
        """A line for each that is to be named now."""
        now = monotonic()
        for rank, entries in heard.items():
            if self._last_reports.get(rank, (-1, 0.0))[0] != entries["number"]:
                self._last_reports[rank] = entries["number"], now
                self._steps.extend(step[1] for step in entries["steps"][-1:])
        waits = [entries["activity"] for entries in heard.values() if _waits(entries)]
        longest = max(waits, key=lambda activity: float(activity["lasts"]), default=None)
        if longest is None or longest["lasts"] < self.long:
            return []
        lines = []
        for rank, entries in heard.items():
            step, lasts = entries["activity"]["step"], entries["activity"]["lasts"]
            silent = now - self._last_reports[rank][1]
            busy = not _waits(entries) and lasts >= longest["lasts"] / 2
            if step > longest["step"] or self._named.get(rank) == step:
                continue  # it is through with that, or was named
            if busy or silent >= self.long:
                self._named[rank] = step
                lines.append(self._line(rank, entries, longest["lasts"], silent))
        return lines

    def _line(self, rank: int, entries: Mapping[str, Any], waited: float, silent: float) -> str:
        name = f"rank {rank} on {self._cluster.host(rank).name}"
        now = activity_text(entries["activity"])
        if silent >= self.long:
            now = f"silent for {about(silent, 's')}, last seen {now}"
        return f"{name} holds up the others, who wait for {about(waited, 's')}: it is {now}"


def _waits(entries: Mapping[str, Any]) -> bool:
    return bool(entries["activity"]["phase"] == WAITING_PHASE)

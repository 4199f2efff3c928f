"""What a rank is doing now, for whoever waits for it.

A rank's training thread says which phase of which step it has come to. Who asks later also learns
for how long it has been there, and in which line of the script, from the stack of that thread.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import torch

from thalweg.facts import about
from thalweg.transports.line import Store

KEY = "observed"  # in the store, of each rank
NOT_THE_SCRIPT = tuple(
    str(Path(folder).resolve())
    for folder in (
        Path(__file__).parents[1],
        Path(torch.__file__).parent,
        sysconfig.get_path("stdlib"),
    )
)
WAITING = "waiting for averages"


class Activity:
    """Of the thread that makes it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._now = ("starting", 0, monotonic())

    def comes_to(self, phase: str, step: int) -> None:
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
    return name.startswith("<") or name.startswith(NOT_THE_SCRIPT)


def key_of(rank: int, formation: int = 1) -> str:
    """Each formation but the first has a part of the run's store to itself."""
    return f"{KEY}/{rank}" if formation == 1 else f"formed/{formation}/{KEY}/{rank}"


def last_seen(store: Store, key: str) -> str:
    """What a rank has last told of itself; empty if nothing."""
    with suppress(RuntimeError, ValueError, KeyError):  # torch's DistError is a RuntimeError
        if store.check([key]):
            return activity_text(json.loads(store.get(key))["activity"])
    return ""

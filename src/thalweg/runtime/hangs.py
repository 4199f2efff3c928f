"""Who holds up the others: not one of those that wait.

When a rank waits for averages for long, those who don't wait are the cause: they compute, or load,
or say nothing any more. Under plans that wait for nobody, nobody is held up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from time import monotonic
from typing import Any

from thalweg.facts import Cluster, about
from thalweg.runtime.activity import WAITING, activity_text

SHORTEST, TIMES_A_STEP = 10.0, 10.0  # seconds, and usual steps, that are long
REMEMBERED = 50  # steps


class Hangs:
    """The first member's: of what all tell."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._heard: dict[int, tuple[int, float]] = {}  # the last number, and when it came
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._named: dict[int, int] = {}  # at which step

    @property
    def long(self) -> float:
        """Seconds."""
        usual = median(self._steps) if self._steps else 0.0
        return max(SHORTEST, TIMES_A_STEP * usual)

    def look(self, heard: Mapping[int, Mapping[str, Any]]) -> list[str]:
        """A line for each that is to be named now."""
        now = monotonic()
        for rank, entries in heard.items():
            if self._heard.get(rank, (-1, 0.0))[0] != entries["number"]:
                self._heard[rank] = entries["number"], now
                self._steps.extend(step[1] for step in entries["steps"][-1:])
        waited = [e["activity"]["lasts"] for e in heard.values() if _waits(e)]
        if not waited or max(waited) < self.long:
            return []
        lines = []
        for rank, entries in heard.items():
            step = entries["activity"]["step"]
            silent = now - self._heard[rank][1]
            if self._named.get(rank) == step or (_waits(entries) and silent < self.long):
                continue
            self._named[rank] = step
            lines.append(self._line(rank, entries, max(waited), silent))
        return lines

    def _line(self, rank: int, entries: Mapping[str, Any], waited: float, silent: float) -> str:
        name = f"rank {rank} on {self._cluster.host(rank).name}"
        now = activity_text(entries["activity"])
        if silent >= self.long:
            now = f"silent for {about(silent, 's')}, last seen {now}"
        return f"{name} holds up the others, who wait for {about(waited, 's')}: it is {now}"


def _waits(entries: Mapping[str, Any]) -> bool:
    return bool(entries["activity"]["phase"] == WAITING)

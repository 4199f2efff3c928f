"""A model judged while it trains, such that judging costs the training nothing.

Rank 0 judges, inside a consensus, and the others wait for its word: cores are few. The word also
says when to go on, a moment later for all at once, by the clock that processes of one machine
share. So no step waits for a rank that was still busy with this, and the time of it can be left
out on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from time import monotonic, sleep

from thalweg.errors import RunError
from thalweg.runtime import World
from thalweg.runtime.world import LONGEST_PAUSE
from thalweg.training import Run

TO_HEAR_IT = 2 * LONGEST_PAUSE  # seconds until all have looked at the store


class Evaluations:
    """`values` are pairs of a step and what the model was worth there, the same on all ranks."""

    def __init__(self, run: Run, judge: Callable[[], float], timeout: float) -> None:
        self.values: list[tuple[int, float]] = []
        self._run = run
        self._judge = judge
        self._timeout = timeout
        self._world = World.join(timeout)
        self._alarm = self._world.alarm()

    def take(self) -> None:
        key = f"evaluated/{self._run.step}"
        with self._run.consensus():
            if self._run.rank == 0:
                value = self._judge()
                self._world.put(key, json.dumps([value, monotonic() + TO_HEAR_IT]))
            told = self._world.wait_for(key, self._timeout, self._alarm)
        if told is None:
            raise RunError(
                f"rank 0 hasn't evaluated step {self._run.step} after {self._timeout:g} s",
                "evaluate fewer samples, or allow more time",
            )
        value, resume = json.loads(told)
        self.values.append((self._run.step, value))
        sleep(max(0.0, resume - monotonic()))

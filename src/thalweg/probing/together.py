"""All ranks of a run at once, on its own engine: they meet, they run a schedule, they compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from thalweg.engine.engine import Engine, Task
from thalweg.engine.execute import RankProgram
from thalweg.facts import Cluster
from thalweg.schedules import Group, Schedule
from thalweg.schedules.topologies.ring import ring
from thalweg.schedules.topologies.star import star
from thalweg.transports import Array

Claim = Callable[[], int]
"""The number of the next round; all ranks count alike."""


class ProbeCollectives:
    """`step` and what `claim` gives number the rounds, apart from those of a training."""

    def __init__(self, engine: Engine, cluster: Cluster, claim: Claim, step: int = 0) -> None:
        self._engine = engine
        self._claim = claim
        self._step = step
        self._everybody = Group.everybody(cluster)
        self._barrier_program = self.program(star(self._everybody, 1, 4, 0, root=None))

    @property
    def rank(self) -> int:
        return self._engine.rank

    def barrier(self) -> None:
        """Until all are here."""
        self.run(self._barrier_program, np.zeros(1, np.float32))

    def all_gather(self, values: Sequence[float]) -> NDArray[np.float64]:
        """Every rank's values, a row for each; the same on all ranks."""
        table = np.zeros((self._everybody.size, len(values)))
        table[self.rank] = values
        vector = table.reshape(-1)
        if len(vector):
            self.run(self.program(ring(self._everybody, len(vector), vector.itemsize, 0)), vector)
        return table

    def program(self, schedule: Schedule) -> RankProgram:
        return RankProgram.of(schedule, self.rank)

    def run(self, part: RankProgram, vector: Array, times: int = 1) -> None:
        """So many times in a row."""
        numbers = [self._claim() for _ in range(times)]
        self._engine.run(
            [
                Task(program=part, vector=vector, step=self._step, round_number=number)
                for number in numbers
            ]
        )

    def skip_rounds(self, times: int = 1) -> None:
        """From rounds of others, which all ranks count."""
        for _ in range(times):
            self._claim()

"""Trials of the network by the engine that will train: how long schedules take that span what plans
do (`predict.trial`).

Before each repetition all ranks meet, so that they start together. Clocks of different hosts can't
be compared, so a repetition takes as long as the slowest rank's own clock says, from its meeting to
its end. What is over in a few milliseconds is run several times in a row, since meeting isn't
exact. Trials take turns, so that what disturbs a machine for a while doesn't meet all repetitions
of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, sleep

import numpy as np
import torch
import torch.distributed as dist

from thalweg.facts import Cluster
from thalweg.predict.trial import ITEM, SMALL, Trial, schedules, wanted
from thalweg.runtime import Engine, Part, Task, World
from thalweg.schedules import Group, Schedule
from thalweg.schedules.topologies.ring import ring
from thalweg.schedules.topologies.star import star
from thalweg.transports import Array

REPEATS = 5
IN_A_ROW = 8  # of tiny ones
WARM_UP = 1 << 16  # bytes
REST = 0.03  # seconds in which links recover what they carry at once
Claim = Callable[[], int]
"""The number of the next round; all ranks count alike."""
Run = Callable[[int], None]
"""So many times in a row."""
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    pass


def run_trials(
    world: World,
    engine: Engine,
    cluster: Cluster,
    claim: Claim,
    *,
    step: int = 0,
    native: bool = False,
    progress: Progress = silent,
) -> list[Trial]:
    """The same on all ranks, which call this together while nothing else is sent. `native`: of the
    backend's own all-reduce too."""
    if world.size == 1:
        return []
    if native:
        world.join_process_group()
    plan = list(wanted(cluster, backend=native))
    bench = _Bench(engine, cluster, claim, step)
    prepared = [bench.prepared(kind, nbytes) for kind, nbytes in plan]
    seconds: list[float] = []
    for repeat in range(REPEATS):
        for number, run in enumerate(prepared):
            progress(repeat * len(plan) + number, REPEATS * len(plan))
            seconds.append(bench.seconds(run, IN_A_ROW if plan[number][1] <= SMALL else 1))
    progress(REPEATS * len(plan), REPEATS * len(plan))
    slowest = bench.slowest(seconds)
    return [
        Trial(kind, nbytes, tuple(slowest[number :: len(plan)]))
        for number, (kind, nbytes) in enumerate(plan)
    ]


class _Bench:
    """Where this rank takes part in trials."""

    def __init__(self, engine: Engine, cluster: Cluster, claim: Claim, step: int) -> None:
        self._engine = engine
        self._cluster = cluster
        self._claim = claim
        self._step = step
        self._everybody = Group.everybody(cluster)
        self._meeting = self._part(star(self._everybody, 1, ITEM, 0, root=None))

    def seconds(self, run: Run, times: int) -> float:
        """By this rank's clock, after all have met."""
        sleep(REST)
        self._run(self._meeting, np.zeros(1, np.float32), 1)
        start = perf_counter()
        run(times)
        return (perf_counter() - start) / times

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Of all ranks, each of these."""
        table = np.zeros((self._everybody.size, len(seconds)))
        table[self._engine.rank] = seconds
        vector = table.reshape(-1)
        self._run(self._part(ring(self._everybody, len(vector), vector.itemsize, 0)), vector, 1)
        return [float(second) for second in table.max(axis=0)]

    def prepared(self, kind: str, nbytes: int) -> Run:
        """Such a trial, once its connections are there."""
        run = self._trial(kind, nbytes)
        self._trial(kind, min(nbytes, WARM_UP))(1)
        return run

    def _trial(self, kind: str, nbytes: int) -> Run:
        if kind == "native":
            return partial(_all_reduce, torch.zeros(max(1, nbytes // ITEM)))
        rank = self._engine.rank
        own = [each for each in schedules(kind, self._cluster, nbytes) if rank in each.ranks]
        if not own:
            return self._stay_away
        [schedule] = own
        return partial(self._run, self._part(schedule), np.zeros(schedule.elements, np.float32))

    def _part(self, schedule: Schedule) -> Part:
        return Part.of(schedule, self._engine.rank)

    def _run(self, part: Part, vector: Array, times: int) -> None:
        numbers = [self._claim() for _ in range(times)]
        tasks = [
            Task(part=part, vector=vector, step=self._step, round_number=number)
            for number in numbers
        ]
        self._engine.run(tasks)

    def _stay_away(self, times: int) -> None:
        """From rounds of others, which all ranks count."""
        for _ in range(times):
            self._claim()


def _all_reduce(tensor: torch.Tensor, times: int) -> None:
    for _ in range(times):
        dist.all_reduce(tensor)

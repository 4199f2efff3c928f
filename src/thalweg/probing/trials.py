"""Trials of the network by the engine that will train: how long schedules take that span what plans
do (`predict.trial`).

Before each repetition all ranks meet, so that they start together. Clocks of different hosts can't
be compared, so a repetition takes as long as the slowest rank's own clock says, from its meeting to
its end. What is over in a few milliseconds is run several times in a row, since meeting isn't
exact. Trials take turns, so that what disturbs a machine for a while doesn't meet all repetitions
of one of them.

The backend is tried in a group of its own, which leaves the script's alone. Where Gloo doesn't
connect all ranks, or the script's group isn't one of Gloo, it isn't tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from thalweg.facts import Cluster
from thalweg.predict.trial import ITEM, SMALL, Trial, busy, in_buckets, schedules, wanted
from thalweg.probing.together import Together
from thalweg.runtime import World

LEAST, MOST = 3, 5  # repetitions
BUDGET = 6.0  # seconds for all of them, at the links' rates
IN_A_ROW = 8  # of tiny ones
WARM_UP = 1 << 16  # bytes
REST = 0.03  # seconds in which links recover what they carry at once
PATIENCE = 60.0  # seconds at most for the backend, and less than the engine's for who waits there
Run = Callable[[int], None]
"""So many times in a row."""
Progress = Callable[[int, int], None]
"""Called with how many trials are done, and of how many."""


def run_trials(
    room: World,
    together: Together,
    cluster: Cluster,
    *,
    native: bool = False,
    typical: int | None = None,
    progress: Progress = lambda done, total: None,
) -> list[Trial]:
    """The same on all ranks, which call this together while nothing else is sent, in a room that
    nothing else uses. `native`: of the backend's own all-reduce too, where that can be had.
    `typical` are the bytes that rounds will have, if known."""
    if room.size == 1:
        return []
    gloo = _gloo(room, together) if native else None
    plan = list(wanted(cluster, backend=gloo is not None, typical=typical))
    repeats = _repeats(cluster, plan)
    prepared = [_prepared(together, gloo, cluster, kind, nbytes) for kind, nbytes in plan]
    seconds: list[float] = []
    for repeat in range(repeats):
        for number, run in enumerate(prepared):
            progress(repeat * len(plan) + number, repeats * len(plan))
            times = IN_A_ROW if plan[number][1] <= SMALL else 1
            seconds.append(_seconds(together, run, times))
    progress(repeats * len(plan), repeats * len(plan))
    slowest = [float(second) for second in together.compare(seconds).max(axis=0)]
    return [
        Trial(kind, nbytes, tuple(slowest[number :: len(plan)]))
        for number, (kind, nbytes) in enumerate(plan)
    ]


def _repeats(cluster: Cluster, plan: Sequence[tuple[str, int]]) -> int:
    once = sum(busy(kind, cluster, nbytes) for kind, nbytes in plan)
    return MOST if once * MOST <= BUDGET else max(LEAST, int(BUDGET / once))


def _gloo(room: World, together: Together) -> Any:
    """A group of all ranks; None on all of them if one isn't connected."""
    if dist.is_initialized() and "cpu:gloo" not in dist.get_backend_config():
        return None
    gloo = _connected(room)
    return gloo if together.compare([gloo is not None]).all() else None


def _connected(room: World) -> Any:
    patience = timedelta(seconds=min(PATIENCE, room.timeout / 2))
    try:
        gloo: Any = ProcessGroupGloo(
            PrefixStore("gloo", room.store), room.rank, room.size, patience
        )
        _all_reduce(gloo, [torch.zeros(1)], 1)
    except RuntimeError:
        return None
    return gloo


def _prepared(together: Together, gloo: Any, cluster: Cluster, kind: str, nbytes: int) -> Run:
    """Such a trial, once its connections are there."""
    _trial(together, gloo, cluster, kind, min(nbytes, WARM_UP))(1)
    return _trial(together, gloo, cluster, kind, nbytes)


def _trial(together: Together, gloo: Any, cluster: Cluster, kind: str, nbytes: int) -> Run:
    if kind == "native":
        parts = in_buckets(max(1, nbytes // ITEM))
        return partial(_all_reduce, gloo, [torch.zeros(elements) for elements in parts])
    own = [each for each in schedules(kind, cluster, nbytes) if together.rank in each.ranks]
    if not own:
        return together.stay_away
    [schedule] = own
    return partial(together.run, together.part(schedule), np.zeros(schedule.elements, np.float32))


def _seconds(together: Together, run: Run, times: int) -> float:
    """By this rank's clock, after all have met."""
    sleep(REST)
    together.meet()
    start = perf_counter()
    run(times)
    return (perf_counter() - start) / times


def _all_reduce(gloo: Any, tensors: Sequence[torch.Tensor], times: int) -> None:
    for _ in range(times):
        works = [gloo.allreduce([tensor]) for tensor in tensors]
        for work in works:
            work.wait()

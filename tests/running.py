"""Run a schedule for real, one thread a rank."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from thalweg.runtime import Part, flat, run_threads
from thalweg.runtime.execute import execute
from thalweg.schedules import Schedule
from thalweg.transports import Array, Transport

TIMEOUT = 20.0


def run(
    schedule: Schedule, inputs: dict[int, Array], cut: Collection[tuple[int, int]] = ()
) -> dict[int, Array]:
    """What each rank's vector becomes; messages of cut pairs are lost."""

    def work(transport: Transport) -> Array:
        vector = inputs[transport.rank].copy()
        execute(
            Part.of(schedule, transport.rank), transport, flat(schedule, vector), timeout=TIMEOUT
        )
        return vector

    return run_threads(schedule.ranks, work, cut)


def whole_numbers(schedule: Schedule, seed: int = 0) -> dict[int, Array]:
    """A different vector for each rank, whose sums have no rounding."""
    rng = np.random.default_rng(seed)
    return {rank: rng.integers(-99, 99, schedule.elements).astype(float) for rank in schedule.ranks}


def mean_sets(schedule: Schedule, rank: int) -> list[int]:
    """The ranks whose sum the schedule promises to this one."""
    promised = schedule.after.holds(rank, 0)
    assert isinstance(promised, int)
    return [other for other in range(promised.bit_length()) if promised >> other & 1]

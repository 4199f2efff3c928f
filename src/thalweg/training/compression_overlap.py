"""The choice whether buckets are compressed during backward or after it, by measurement.

Encoding needs the cores that backward needs, so doing both at once may take longer than one after
the other. A few steps of each kind are timed by turns, from the first gradient to the last average,
and the mean over all ranks decides. Results don't depend on it, to the last bit.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic, thread_time

import torch

from thalweg.engine.engine import ChainTasks
from thalweg.engine.execute import Task

OVERLAP_WARMUP_STEPS = 2
OVERLAP_TRIAL_STEPS = 3  # of each kind
TIMING_HISTORY_STEPS = 4096
UNFINISHED_TRIAL_SECONDS = 1e9  # for a kind that was never timed
Average = Callable[[Sequence[torch.Tensor]], None]


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one step on this rank, in seconds."""

    step: int
    backward: float  # from the first gradient to the last
    exposed: float  # from there until all averages are in place
    codec: float  # CPU time of encoding and decoding
    serial: bool  # compressed after backward


class Overlap:
    """The choice for one plan. `average` overwrites tensors with their mean over all ranks; None if
    there is no choice. `first` is the first step with compression; steps are counted from it, so
    that all ranks decide at the same step."""

    def __init__(self, average: Average | None, first: int, fixed: bool | None) -> None:
        self.is_serial = fixed is False
        self.timings: deque[Timing] = deque(maxlen=TIMING_HISTORY_STEPS)
        self._average = average if fixed is None else None
        self._first = first
        self._begun = self._computed = 0.0
        self._codec = 0.0

    def begin(self) -> None:
        """The first gradient is ready."""
        self._begun = monotonic()
        self._codec = 0.0

    def backward_is_over(self) -> None:
        self._computed = monotonic()

    def end(self, step: int) -> None:
        """All averages are in place."""
        now = monotonic()
        backward, exposed = self._computed - self._begun, now - self._computed
        self.timings.append(Timing(step, backward, exposed, self._codec, self.is_serial))
        taken = step - self._first + 1
        if self._average is None or taken < OVERLAP_WARMUP_STEPS:
            return
        if taken >= OVERLAP_WARMUP_STEPS + 2 * OVERLAP_TRIAL_STEPS:
            self._decide(self._average)
            self._average = None
        else:
            self.is_serial = (taken - OVERLAP_WARMUP_STEPS) % 2 == 0

    def timed(self, chain: ChainTasks) -> ChainTasks:
        """The chain with its CPU time counted."""
        while True:
            began = thread_time()
            tasks: Sequence[Task] | None = next(chain, None)
            self._codec += thread_time() - began
            if tasks is None:
                return
            yield tasks

    def _decide(self, average: Average) -> None:
        tried = [t for t in self.timings if t.step >= self._first + OVERLAP_WARMUP_STEPS]

        def typical(*, serial: bool) -> float:
            times = [t.backward + t.exposed for t in tried if t.serial is serial]
            return median(times or [UNFINISHED_TRIAL_SECONDS])

        seconds = torch.tensor([typical(serial=False), typical(serial=True)])
        average([seconds])
        overlapped, serial = seconds.tolist()
        self.is_serial = serial < overlapped
        logging.getLogger("thalweg").info(
            "compression %s backward: %.0f ms per step during it, %.0f ms after it",
            "after" if self.is_serial else "during",
            1000 * overlapped,
            1000 * serial,
        )

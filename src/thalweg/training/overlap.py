"""Whether buckets are compressed while backward still runs, or when it is over.

Encoding needs the cores that backward needs, so doing both at once may take longer than one after
the other. It is tried: a few steps each way by turns, timed from the first gradient to the last
average, the mean over all ranks decides. Results don't depend on it, to the last bit.
"""

from __future__ import annotations

import logging
from statistics import median
from time import monotonic

import torch

from thalweg.training.sharing import Sharing

SETTLING = 2  # steps that aren't timed
TRIALS = 3  # steps each way


class Overlap:
    """`first` is the first step at which anything is compressed."""

    def __init__(self, sharing: Sharing, first: int) -> None:
        self.is_serial = False
        self._sharing = sharing
        self._first = first
        self._begun = 0.0
        self._trials = 0
        self._seconds: dict[bool, list[float]] = {False: [], True: []}

    def begin(self, step: int) -> None:
        self._begun = monotonic()

    def end(self, step: int) -> None:
        """All averages are there."""
        if step < self._first or self._trials >= SETTLING + 2 * TRIALS:
            return
        self._trials += 1
        if self._trials > SETTLING:
            self._seconds[self.is_serial].append(monotonic() - self._begun)
            self.is_serial = not self.is_serial
        if self._trials == SETTLING + 2 * TRIALS:
            self._decide()

    def _decide(self) -> None:
        seconds = torch.tensor([median(self._seconds[way]) for way in (False, True)])
        self._sharing.average([seconds])
        overlapped, serial = seconds.tolist()
        self.is_serial = serial < overlapped
        logging.getLogger("thalweg").info(
            "compressed %s backward: %.0f ms a step while it runs, %.0f ms after it",
            "after" if self.is_serial else "during",
            1000 * overlapped,
            1000 * serial,
        )

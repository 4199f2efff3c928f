"""When everybody came to each step of a coded tree, and how long steps take."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from thalweg.engine.arrivals import Arrival, Arrivals

FIRST_DEADLINE_SECONDS = 10.0  # seconds for a step, while nothing is known
MIN_DEADLINE_SECONDS = 1.0
DEADLINE_P95_FACTOR = 5.0  # a deadline is so many times what 95 % of the steps took
DEADLINE_HISTORY_STEPS = 100  # steps
WATCHED_FINISHED_STEPS = 4  # steps that are watched for late comers when they are over


@dataclass(slots=True)
class _StepArrivals:
    began: float
    ended: float | None = None
    ready: dict[int, float] = field(default_factory=dict)  # this rank's own buckets
    peers: dict[int, float] = field(default_factory=dict)


class StepDeadlines:
    """One rank's record, by its own clock. Who comes when a step is over is noted as well."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self._steps: dict[int, _StepArrivals] = {}
        self._forgotten = 0  # all steps before it
        self._taken: deque[float] = deque(maxlen=DEADLINE_HISTORY_STEPS)

    @property
    def deadline(self) -> float:
        """Seconds that a step may take, by how long they usually do."""
        if not self._taken:
            return FIRST_DEADLINE_SECONDS
        usual = float(np.percentile(self._taken, 95))
        return max(MIN_DEADLINE_SECONDS, DEADLINE_P95_FACTOR * usual)

    def seen(self, step: int, now: float, peer: int | None = None) -> None:
        """Something of this step has come."""
        if step >= self._forgotten:
            found = self._steps.setdefault(step, _StepArrivals(now))
            if peer is not None:
                found.peers.setdefault(peer, now)

    def ready(self, step: int, bucket: int, now: float) -> None:
        """This rank's own part was there."""
        self.seen(step, now)
        if step in self._steps:
            self._steps[step].ready[bucket] = now

    def first_seen(self, step: int) -> float | None:
        """When the first sign of this step came; None if none has, or it is over."""
        found = self._steps.get(step)
        return None if found is None or found.ended is not None else found.began

    def finish_step(self, step: int, now: float, *, usual: bool = True) -> None:
        """This step is, and so are those before it. How long one took that was cut short says
        nothing: deadlines would grow by themselves."""
        found = self._steps.get(step)
        if found is not None and usual:
            self._taken.append(now - found.began)
        for number, entry in self._steps.items():
            if number <= step and entry.ended is None:
                entry.ended = now
        self._forgotten = max(self._forgotten, step + 1 - WATCHED_FINISHED_STEPS)
        for old in sorted(number for number in self._steps if number < self._forgotten):
            self._note(old, self._steps.pop(old))

    def _note(self, step: int, entry: _StepArrivals) -> None:
        for bucket, ready in sorted(entry.ready.items()):
            self.arrivals.add(
                Arrival(
                    step=step,
                    bucket=bucket,
                    ready=ready,
                    started=ready,
                    ended=entry.ended or ready,
                    peers=dict(entry.peers),
                )
            )

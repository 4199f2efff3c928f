"""Arrival times of all ranks at each bucket. Stragglers show in these, not in the round's duration.

An all-reduce takes equally long for all of its ranks, so its duration identifies no straggler. The
time at which a rank's own bucket was ready does, and so do the times at which the first message of
each peer arrived. All times are by this rank's clock.

In a coded tree, where no rank waits for stragglers, deadlines follow from the times of the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from threading import Lock
from typing import TypeVar

import numpy as np

from thalweg.engine.execute import Leading

ARRIVAL_HISTORY_ROUNDS = 10_000
MAX_ROUND_DURATION_STEPS = 16
FIRST_DEADLINE_SECONDS = 10.0  # before any step has been measured
MIN_DEADLINE_SECONDS = 1.0
DEADLINE_P95_FACTOR = 5.0  # ratio of the deadline to the 95th percentile of step times
DEADLINE_HISTORY_STEPS = 100
WATCHED_FINISHED_STEPS = 4  # finished steps whose late arrivals are still recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The times of one round of one bucket, in seconds of `time.monotonic`."""

    step: int
    bucket: int
    ready: float  # this rank's bucket was complete
    started: float  # the communication thread began the round
    ended: float
    peers: dict[int, float]  # first message of each peer
    leading: Mapping[int, Leading] = field(default_factory=dict)  # of rounds with a handshake


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The time that a compressor spent on a bucket in the communication thread."""

    step: int
    bucket: int
    began: float
    ended: float


T = TypeVar("T", Arrival, Encoded)


class Arrivals:
    """The latest rounds, newest last; one thread writes them, any thread may read them."""

    def __init__(self) -> None:
        self._rounds: deque[Arrival] = deque(maxlen=ARRIVAL_HISTORY_ROUNDS)
        self._encoded: deque[Encoded] = deque(maxlen=ARRIVAL_HISTORY_ROUNDS)
        self._lock = Lock()

    def add(self, arrival: Arrival) -> None:
        with self._lock:
            self._rounds.append(arrival)

    def __iter__(self) -> Iterator[Arrival]:
        with self._lock:
            return iter(list(self._rounds))

    def since(self, step: int) -> list[Arrival]:
        """The rounds of this step and later ones, newest first. They are in order except for
        rounds that took several steps."""
        return self._since(step, self._rounds)

    def add_encoded(self, encoded: Encoded) -> None:
        with self._lock:
            self._encoded.append(encoded)

    def encoded_since(self, step: int) -> list[Encoded]:
        """The compressors' work in this step and later ones, newest first."""
        return self._since(step, self._encoded)

    def _since(self, step: int, history: deque[T]) -> list[T]:
        with self._lock:
            oldest = step - MAX_ROUND_DURATION_STEPS
            newest = takewhile(lambda entry: entry.step >= oldest, reversed(history))
            return [entry for entry in newest if entry.step >= step]

    def __len__(self) -> int:
        return len(self._rounds)


@dataclass(slots=True)
class _StepArrivals:
    began: float
    ended: float | None = None
    ready: dict[int, float] = field(default_factory=dict)  # this rank's buckets
    peers: dict[int, float] = field(default_factory=dict)


class StepDeadlines:
    """The arrival times that one rank records by its own clock, also after the end of a step."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self._steps: dict[int, _StepArrivals] = {}
        self._first_watched = 0  # earlier steps are no longer recorded
        self._step_seconds: deque[float] = deque(maxlen=DEADLINE_HISTORY_STEPS)

    @property
    def deadline(self) -> float:
        """The time limit of a step in seconds, from the step times so far."""
        if not self._step_seconds:
            return FIRST_DEADLINE_SECONDS
        p95 = float(np.percentile(self._step_seconds, 95))
        return max(MIN_DEADLINE_SECONDS, DEADLINE_P95_FACTOR * p95)

    def seen(self, step: int, now: float, peer: int | None = None) -> None:
        """Record a message of this step, or this rank's own contribution."""
        if step >= self._first_watched:
            arrivals = self._steps.setdefault(step, _StepArrivals(now))
            if peer is not None:
                arrivals.peers.setdefault(peer, now)

    def ready(self, step: int, bucket: int, now: float) -> None:
        """Record that this rank's bucket is ready."""
        self.seen(step, now)
        if step in self._steps:
            self._steps[step].ready[bucket] = now

    def first_seen(self, step: int) -> float | None:
        """The time of this step's first message; None before that, and after the step's end."""
        arrivals = self._steps.get(step)
        return None if arrivals is None or arrivals.ended is not None else arrivals.began

    def finish_step(self, step: int, now: float, *, usual: bool = True) -> None:
        """Mark this step and all earlier ones as finished. The duration of a step that a deadline
        ended (not `usual`) doesn't count: deadlines would grow by themselves."""
        arrivals = self._steps.get(step)
        if arrivals is not None and usual:
            self._step_seconds.append(now - arrivals.began)
        for number, entry in self._steps.items():
            if number <= step and entry.ended is None:
                entry.ended = now
        self._first_watched = max(self._first_watched, step + 1 - WATCHED_FINISHED_STEPS)
        for old in sorted(number for number in self._steps if number < self._first_watched):
            entry = self._steps.pop(old)
            for bucket, ready in sorted(entry.ready.items()):
                self.arrivals.add(
                    Arrival(
                        step=old,
                        bucket=bucket,
                        ready=ready,
                        started=ready,
                        ended=entry.ended or ready,
                        peers=dict(entry.peers),
                    )
                )

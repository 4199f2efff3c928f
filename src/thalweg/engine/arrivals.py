"""Arrival times of all ranks at each bucket. Stragglers show in these, not in the round's duration.

An all-reduce takes equally long for all of its ranks, so its duration identifies no straggler. The
time at which a rank's own bucket was ready does, and so do the times at which the first message of
each peer arrived. All times are by this rank's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from threading import Lock
from typing import TypeVar

from thalweg.engine.execute import Leading

ARRIVAL_HISTORY_ROUNDS = 10_000
MAX_ROUND_DURATION_STEPS = 16


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

    def __init__(self, kept: int = ARRIVAL_HISTORY_ROUNDS) -> None:
        self._rounds: deque[Arrival] = deque(maxlen=kept)
        self._encoded: deque[Encoded] = deque(maxlen=kept)
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

"""When each rank arrived at each bucket: lateness is this, never how long the exchange took.

An all-reduce takes as long for the early as for the late, so its duration names nobody. What does
is the moment at which a rank's own bucket was ready, and the moments at which the first message of
each of its peers came. All by this rank's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from threading import Lock

from thalweg.engine.execute import Leading

ARRIVAL_HISTORY_ROUNDS = 10_000  # rounds
MAX_ROUND_DURATION_STEPS = 16  # steps that a round may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One round of one bucket, in seconds of `time.monotonic`."""

    step: int
    bucket: int
    ready: float  # this rank's own part was there
    started: float  # the communication thread took it up
    ended: float
    peers: dict[int, float]  # first message of each peer
    leading: Mapping[int, Leading] = field(default_factory=dict)  # where hands are shaken


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A compressor was at work on a bucket, in the communication thread."""

    step: int
    bucket: int
    began: float
    ended: float


class Arrivals:
    """The last rounds, newest last; written by one thread, read by any."""

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
        """Of this step and later ones, newest first. They come in order but for rounds that took
        several steps."""
        with self._lock:
            newest = takewhile(
                lambda arrival: arrival.step >= step - MAX_ROUND_DURATION_STEPS,
                reversed(self._rounds),
            )
            return [arrival for arrival in newest if arrival.step >= step]

    def add_encoded(self, encoded: Encoded) -> None:
        with self._lock:
            self._encoded.append(encoded)

    def encoded_since(self, step: int) -> list[Encoded]:
        """The same of compressors."""
        with self._lock:
            newest = takewhile(
                lambda one: one.step >= step - MAX_ROUND_DURATION_STEPS, reversed(self._encoded)
            )
            return [one for one in newest if one.step >= step]

    def __len__(self) -> int:
        return len(self._rounds)

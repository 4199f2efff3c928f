"""One clock for all ranks of a run, though the clocks of their hosts differ.

The clock of the first member is the reference clock. The other ranks measure its offset by
Cristian's algorithm (1989): a rank sends a ping and takes the answer for the time half-way. Of
several pings the fastest counts, and its offset is wrong by half of its round trip at most. Ping
and answer are keys of the store, which the two ranks poll.

    a rank           t0  ping/k ........................  t1      offset = answer - (t0 + t1) / 2
    the first member              answer := its time

Clocks drift, some 20 microseconds in a second, so a rank repeats the measurement from time to time.
A rank that becomes the first member keeps the offset that it has measured last.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep, time
from typing import Any

from thalweg.observe.records import ClockSample

CLOCK_PING_COUNT = 8
CLOCK_SYNC_PERIOD_SECONDS = 60.0  # between two measurements
CLOCK_RETRY_SECONDS = 5.0  # after a measurement that failed
PING_BACK_TIMEOUT_SECONDS = 1.5  # until the first member is ready to answer
CLOCK_PING_TIMEOUT_SECONDS = 0.5  # until it answers a ping
# Between two looks for the key that says that it is ready, and for a ping or an answer.
PING_BACK_POLL_SECONDS, CLOCK_PING_POLL_SECONDS = 0.01, 0.0002


class SyncedClock:
    """One rank's view of the reference clock, in seconds since 1970. `own` is the clock whose times
    are in this rank's records, and `error` the error of the offset between the two."""

    def __init__(self, own: Callable[[], float] = monotonic) -> None:
        self.offset = time() - own()
        self.error = float("inf")  # before the first measurement
        self.requests = 0
        self._own = own
        self._due = float("-inf")

    def now(self) -> float:
        return self._own() + self.offset

    def keep(self) -> ClockSample | None:
        """Act as the reference clock; a record of it, the first time."""
        if self.error < float("inf"):
            return None
        self.error = 0.0
        return self._sample()

    @property
    def is_due(self) -> bool:
        return self._own() >= self._due

    def synchronise(self, store: Any, rank: int) -> ClockSample | None:
        """Measure the offset of the reference clock; None if the first member doesn't answer. This
        rank has requested it by its published number of `requests`, so `serve` answers it."""
        self._due = self._own() + CLOCK_RETRY_SECONDS
        prefix = f"clock/{rank}/{self.requests}"
        with suppress(RuntimeError):  # torch's DistError is one
            if not _comes(store, f"{prefix}/go", PING_BACK_TIMEOUT_SECONDS, PING_BACK_POLL_SECONDS):
                return None
            pings = []
            for number in range(CLOCK_PING_COUNT):
                began = self._own()
                store.set(f"{prefix}/ping/{number}", "")
                if not _comes(
                    store,
                    f"{prefix}/answer/{number}",
                    CLOCK_PING_TIMEOUT_SECONDS,
                    CLOCK_PING_POLL_SECONDS,
                ):
                    return None
                ended = self._own()
                answer = float(store.get(f"{prefix}/answer/{number}"))
                pings.append((ended - began, answer - (began + ended) / 2))
            took, self.offset = min(pings)
            self.error = took / 2
            self._due = self._own() + CLOCK_SYNC_PERIOD_SECONDS
            return self._sample()
        return None

    def serve(self, store: Any, rank: int, request: int) -> None:
        """Answer this request of a rank as the reference clock. Its keys are deleted, except for
        the last ping and its answer, which the rank may not have read."""
        prefix = f"clock/{rank}/{request}"
        with suppress(RuntimeError):
            store.set(f"{prefix}/go", "")
            for number in range(CLOCK_PING_COUNT):
                if not _comes(
                    store,
                    f"{prefix}/ping/{number}",
                    CLOCK_PING_TIMEOUT_SECONDS,
                    CLOCK_PING_POLL_SECONDS,
                ):
                    return  # without deleting an answer that the rank may still wait for
                store.set(f"{prefix}/answer/{number}", repr(self.now()))
            read = [
                f"{prefix}/{kind}/{n}"
                for kind in ("ping", "answer")
                for n in range(CLOCK_PING_COUNT - 1)
            ]
            for key in (f"{prefix}/go", *read):
                store.delete_key(key)

    def _sample(self) -> ClockSample:
        return ClockSample(at=self._own(), offset=self.offset, error=self.error)


def _comes(store: Any, key: str, seconds: float, pause: float) -> bool:
    """True if the key appears within `seconds`. (Torch's own wait logs a timeout on stderr.)"""
    deadline = monotonic() + seconds
    while not store.check([key]):
        if monotonic() > deadline:
            return False
        sleep(pause)
    return True

"""One clock for all ranks of a run, though their hosts' differ.

The first of the members keeps the time. Another asks it as in Cristian's algorithm (1989): it sends
a ping and takes the answer for the moment half-way; of several the fastest counts, and is wrong by
half of its round trip at most. Both go through the store, where either looks for the other's key.

    asker   t0  ping/k ........................  t1      offset = answer - (t0 + t1) / 2
    keeper               answer := its time

Clocks drift, some 20 microseconds in a second, so a rank asks again from time to time. One that
takes over the keeper's office goes on with the time that it had from it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep, time
from typing import Any

from thalweg.observe import ClockSample

CLOCK_PING_COUNT = 8
# Seconds until it is asked again, and if it wasn't answered.
CLOCK_SYNC_PERIOD_SECONDS, CLOCK_RETRY_SECONDS = 60.0, 5.0
PING_BACK_TIMEOUT_SECONDS = 1.5  # seconds for one that has asked to be asked back
CLOCK_PING_TIMEOUT_SECONDS = 0.5  # seconds for a ping's
# Seconds between two looks for a key.
PING_BACK_POLL_SECONDS, CLOCK_PING_POLL_SECONDS = 0.01, 0.0002


class SyncedClock:
    """One rank's view of it: seconds since 1970, as the keeper's host counts them. `own` is the
    clock that this rank's records are written by."""

    def __init__(self, own: Callable[[], float] = monotonic) -> None:
        self.offset = time() - own()
        self.error = float("inf")  # nobody was asked so far
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
        """Measure the offset from the reference clock, which this rank has requested for the
        `asked`-th time; None if the reference rank doesn't answer."""
        self._due = self._own() + CLOCK_RETRY_SECONDS
        room = f"clock/{rank}/{self.requests}"
        with suppress(RuntimeError):  # torch's DistError is one
            if not _comes(store, f"{room}/go", PING_BACK_TIMEOUT_SECONDS, PING_BACK_POLL_SECONDS):
                return None
            pings = []
            for number in range(CLOCK_PING_COUNT):
                began = self._own()
                store.set(f"{room}/ping/{number}", "")
                if not _comes(
                    store,
                    f"{room}/answer/{number}",
                    CLOCK_PING_TIMEOUT_SECONDS,
                    CLOCK_PING_POLL_SECONDS,
                ):
                    return None
                ended = self._own()
                answer = float(store.get(f"{room}/answer/{number}"))
                pings.append((ended - began, answer - (began + ended) / 2))
            took, self.offset = min(pings)
            self.error = took / 2
            self._due = self._own() + CLOCK_SYNC_PERIOD_SECONDS
            return self._sample()
        return None

    def serve(self, store: Any, rank: int, asked: int) -> None:
        """Answer another rank as the reference clock; few keys stay in the store."""
        room = f"clock/{rank}/{asked}"
        with suppress(RuntimeError):
            store.set(f"{room}/go", "")
            for number in range(CLOCK_PING_COUNT):
                if not _comes(
                    store,
                    f"{room}/ping/{number}",
                    CLOCK_PING_TIMEOUT_SECONDS,
                    CLOCK_PING_POLL_SECONDS,
                ):
                    return  # it may still read the last answer, and would wait for one that is gone
                store.set(f"{room}/answer/{number}", repr(self.now()))
            read = [
                f"{room}/{kind}/{n}"
                for kind in ("ping", "answer")
                for n in range(CLOCK_PING_COUNT - 1)
            ]
            for key in (f"{room}/go", *read):
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

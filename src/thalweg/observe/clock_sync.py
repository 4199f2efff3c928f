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

from thalweg.observe import Moment

PINGS = 8
AGAIN, SOONER = 60.0, 5.0  # seconds until it is asked again, and if it wasn't answered
PATIENCE = 1.5  # seconds for one that has asked to be asked back
ANSWER = 0.5  # seconds for a ping's
SELDOM, OFTEN = 0.01, 0.0002  # seconds between two looks for a key


class CommonClock:
    """One rank's view of it: seconds since 1970, as the keeper's host counts them. `own` is the
    clock that this rank's records are written by."""

    def __init__(self, own: Callable[[], float] = monotonic) -> None:
        self.offset = time() - own()
        self.error = float("inf")  # nobody was asked so far
        self.asked = 0
        self._own = own
        self._due = float("-inf")

    def now(self) -> float:
        return self._own() + self.offset

    def keep(self) -> Moment | None:
        """As the keeper; a record of it, the first time."""
        if self.error < float("inf"):
            return None
        self.error = 0.0
        return self._moment()

    @property
    def is_due(self) -> bool:
        return self._own() >= self._due

    def ask(self, store: Any, rank: int) -> Moment | None:
        """Of the keeper, who has been told that this rank asks for the `asked`-th time; None if it
        doesn't answer."""
        self._due = self._own() + SOONER
        room = f"clock/{rank}/{self.asked}"
        with suppress(RuntimeError):  # torch's DistError is one
            if not _comes(store, f"{room}/go", PATIENCE, SELDOM):
                return None
            pings = []
            for number in range(PINGS):
                began = self._own()
                store.set(f"{room}/ping/{number}", "")
                if not _comes(store, f"{room}/answer/{number}", ANSWER, OFTEN):
                    return None
                ended = self._own()
                answer = float(store.get(f"{room}/answer/{number}"))
                pings.append((ended - began, answer - (began + ended) / 2))
            took, self.offset = min(pings)
            self.error = took / 2
            self._due = self._own() + AGAIN
            return self._moment()
        return None

    def answer(self, store: Any, rank: int, asked: int) -> None:
        """As the keeper. Little of it stays in the store."""
        room = f"clock/{rank}/{asked}"
        with suppress(RuntimeError):
            store.set(f"{room}/go", "")
            for number in range(PINGS):
                if not _comes(store, f"{room}/ping/{number}", ANSWER, OFTEN):
                    return  # it may still read the last answer, and would wait for one that is gone
                store.set(f"{room}/answer/{number}", repr(self.now()))
            read = [f"{room}/{kind}/{n}" for kind in ("ping", "answer") for n in range(PINGS - 1)]
            for key in (f"{room}/go", *read):
                store.delete_key(key)

    def _moment(self) -> Moment:
        return Moment(at=self._own(), offset=self.offset, error=self.error)


def _comes(store: Any, key: str, seconds: float, pause: float) -> bool:
    """Within so many seconds. (Torch's own wait complains on stderr if it doesn't.)"""
    deadline = monotonic() + seconds
    while not store.check([key]):
        if monotonic() > deadline:
            return False
        sleep(pause)
    return True

"""A client of the store that never hangs.

Torch bounds the time of a `get`, but neither of `check` nor of `compare_set`: on a store whose host
is paused or cut off they never return. A `StoreClient` makes such calls in its own thread, on a
connection of its own (two threads on one connection wait for each other), and stops waiting after
the timeout that the store has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar
from weakref import finalize

from thalweg.errors import RunError, StoreLost

T = TypeVar("T")


class Store(Protocol):
    """The part of `torch.distributed.Store` that Thalweg uses.

    compare_set(key, "", value) sets an absent key; all forms return the value that the key then
    has."""

    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def delete_key(self, key: str, /) -> bool: ...


_Calls = SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]


class StoreClient:
    """A rank's client of the store: a call ends in an answer or in RunError, never in a hang."""

    def __init__(self, store: Store, rank: int) -> None:
        self.rank = rank
        self._store = store
        self._process = os.getpid()
        self._broken: RunError | None = None
        self._calls: _Calls = SimpleQueue()
        Thread(target=_serve, args=(store, self._calls), name="store", daemon=True).start()
        finalize(self, self._calls.put, None)

    def call_async(self, call: Callable[[Store], T]) -> Future[T]:
        """Call the store without waiting; the future has its errors, too."""
        if self._process != os.getpid():  # a fork has no threads of its parent's
            raise RunError(
                f"the store client of rank {self.rank} was made in another process",
                "attach in the process that trains",
            )
        if self._broken is not None:
            raise self._broken
        answer: Future[T] = Future()
        self._calls.put((call, answer))
        return answer

    def call(self, call: Callable[[Store], T]) -> T:
        answer = self.call_async(call)
        timeout: timedelta = getattr(self._store, "timeout", timedelta(minutes=5))  # torch's own
        seconds = timeout.total_seconds()
        try:
            return answer.result(seconds)
        except TimeoutError:
            reason = f"no answer within {seconds:g} s"
        except RuntimeError as error:  # torch's DistError is one
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._broken = StoreLost(
            f"rank {self.rank} can't reach the store: {reason}",
            "look whether the launcher still runs, and whether its host answers",
        )
        raise self._broken from None


def _serve(store: Store, calls: _Calls) -> None:
    """Serve calls until None arrives; holds no StoreClient, so that an unused one ends its
    thread."""
    own: Store | None = None
    while (call := calls.get()) is not None:
        work, answer = call
        try:
            if own is None:
                own = store.clone() if hasattr(store, "clone") else store
            answer.set_result(work(own))
        except BaseException as error:
            answer.set_exception(error)
        del call, work, answer

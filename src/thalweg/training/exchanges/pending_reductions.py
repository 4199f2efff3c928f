"""Torch's own all-reduces, which a rendezvous can interrupt.

Gloo raises if a peer dies, and waits for its timeout if one hangs. Neither reaches DDP here: an
all-reduce that fails, or is aborted, looks as if it had completed, and `broken` holds the reason.
Its buffer is undefined then, and Gloo may still write into it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Any

import torch
import torch.distributed as dist

REDUCTION_POLL_SECONDS = 0.1
Reduced = torch.futures.Future[Any]


class PendingReductions:
    """The all-reduces under way. `gives_up` is polled meanwhile, and True aborts them."""

    def __init__(self, gives_up: Callable[[], bool]) -> None:
        self.broken = ""  # the reason of the first failure
        self._gives_up = gives_up
        self._under_way: dict[Reduced, torch.Tensor] = {}
        self._lock = Lock()
        self._closed = Event()
        Thread(target=self._watch, name="thalweg-reductions", daemon=True).start()

    def start(self, buffer: torch.Tensor, ranks: int) -> Reduced:
        """Start the mean all-reduce of a buffer, in place."""
        result: Reduced = torch.futures.Future()
        with self._lock:
            self._under_way[result] = buffer
        try:
            buffer.mul_(1 / ranks)
            work = dist.all_reduce(buffer, async_op=True)
            assert work is not None
            work.get_future().add_done_callback(lambda done: self._done(result, done))
        except RuntimeError as error:  # torch's DistError is one
            self._end(result, _reason(error))
        return result

    def close(self) -> None:
        self._closed.set()

    def _done(self, result: Reduced, done: torch.futures.Future[Any]) -> None:
        try:
            done.value()
        except RuntimeError as error:
            self._end(result, _reason(error))
        else:
            self._end(result)

    def _end(self, result: Reduced, reason: str = "") -> None:
        with self._lock:
            buffer = self._under_way.pop(result, None)
            self.broken = self.broken or reason
        if buffer is not None:
            result.set_result(buffer)

    def _watch(self) -> None:
        while not self._closed.wait(REDUCTION_POLL_SECONDS):
            if self._under_way and self._gives_up():
                with self._lock:
                    aborted = list(self._under_way)
                for result in aborted:
                    self._end(result, "aborted by a rendezvous")


def _reason(error: RuntimeError) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""A selector whose wait another thread can end."""

from __future__ import annotations

import os
import selectors
from contextlib import suppress
from threading import Lock

READ_EVENT, WRITE_EVENT = selectors.EVENT_READ, selectors.EVENT_WRITE


class WakeableSelector(selectors.DefaultSelector):
    """A selector that `wake` makes ready: its `select` then also returns the key with the data
    `drain`, a function to be called."""

    def __init__(self) -> None:
        super().__init__()
        self._woken, self._waker = os.pipe()
        self._lock = Lock()
        self._closed = False
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self.register(self._woken, READ_EVENT, self.drain)

    def wake(self) -> None:
        """End the wait of the thread that selects; any thread may call this."""
        with self._lock, suppress(BlockingIOError):
            if not self._closed:
                os.write(self._waker, b"!")

    def drain(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            super().close()
            os.close(self._woken)
            os.close(self._waker)

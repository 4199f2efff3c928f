"""The end of the backward that is running now."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from torch.autograd import Variable


class AtTheEnd:
    """Calls when the running backward is through; never, if it fails."""

    def __init__(self, call: Callable[[], None]) -> None:
        callback = _Callback(call)
        self._callback = ref(callback)  # only autograd holds it, and lets go of it on failure
        Variable._execution_engine.queue_callback(callback)

    def is_to_come(self) -> bool:
        return self._callback() is not None


class _Callback:
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()

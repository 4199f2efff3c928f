"""Wrappers of a run's transport: a recorder of its messages, or faults for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from thalweg.transports.transport import Transport

Wrapper = Callable[[Transport], Transport]
_wrapper: ContextVar[Wrapper | None] = ContextVar("transport wrapper", default=None)


@contextmanager
def wrapping_transports(wrapper: Wrapper) -> Iterator[None]:
    """Inside, `attach()` gives the run's messages to `wrapper(transport)`."""
    token = _wrapper.set(wrapper)
    try:
        yield
    finally:
        _wrapper.reset(token)


def wrapped(transport: Transport) -> Transport:
    wrapper = _wrapper.get()
    return transport if wrapper is None else wrapper(transport)

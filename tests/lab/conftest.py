"""Names of labs for tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count

import pytest

_NUMBERS = count(1)


@pytest.fixture
def new_name() -> Callable[[], str]:
    """Names for labs that no other test has, nor another run of the tests beside this one."""
    return lambda: f"t{os.getpid()}-{next(_NUMBERS)}"


@pytest.fixture
def name(new_name: Callable[[], str]) -> str:
    return new_name()

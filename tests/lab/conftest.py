"""Where no lab can be had these tests are skipped, and say why."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count

import pytest

from thalweg.errors import LabError
from thalweg.lab import Lab

_NUMBERS = count(1)


@pytest.fixture
def new_name() -> Callable[[], str]:
    """Names for labs that no other test has, nor another run of the tests beside this one."""
    return lambda: f"t{os.getpid()}-{next(_NUMBERS)}"


@pytest.fixture
def name(new_name: Callable[[], str]) -> str:
    return new_name()


@pytest.fixture(scope="session")
def needs_lab() -> None:
    """Found out by building one."""
    try:
        with Lab(hosts=1, name=f"t{os.getpid()}-0"):
            pass
    except LabError as error:
        pytest.skip(str(error))

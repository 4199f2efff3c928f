"""Names of labs for these tests."""

from __future__ import annotations

import os
from itertools import count

import pytest

_NUMBERS = count(1)


@pytest.fixture
def name() -> str:
    return f"td{os.getpid()}-{next(_NUMBERS)}"

"""The limit on the CPU time of a case without the mark `slow`, so that the suite cannot grow back.

CPU time, of this process and of all children that it waited for, because wall time says how busy
the machine is. Only the call counts: a fixture that several cases share belongs to none of them.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from tests.cli.command import spent_by_commands

OPTION = "cpu_limit"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(OPTION, "CPU seconds that a case without the mark `slow` may take", default="20")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    before = cpu_seconds()
    yield
    took, limit = cpu_seconds() - before, float(item.config.getini(OPTION))
    if took > limit and item.get_closest_marker("slow") is None:
        pytest.fail(
            f"this case took {took:.1f} s of CPU, and may take {limit:g}; make it cheaper, "
            "or mark it slow and keep a cheaper case of its subject",
            pytrace=False,
        )


def cpu_seconds() -> float:
    return sum(os.times()[:4]) + spent_by_commands()

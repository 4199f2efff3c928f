"""The plugins of all tests, how several processes share them, and the labs that they share: tests
that need one are skipped where none can be had, and say why."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import examples
from thalweg.errors import LabError
from thalweg.lab import Lab

pytest_plugins = ["pytester", "tests.cpu_limit"]

examples.register()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

ROOT = Path(__file__).parents[1]


@cache
def builds_labs(file: str) -> bool:
    """Whether tests of this file do, by what it names."""
    return re.search(r"\b(needs_lab|lab_of|LabError)\b", (ROOT / file).read_text()) is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Labs first: they take longest, and one process has all of them."""
    items.sort(key=lambda item: not builds_labs(item.nodeid.partition("::")[0]))


class ByFile(LoadScopeScheduling):
    """Of the processes of `pytest -n`, one has all labs, which would slow each other down; other
    files stay together, for the fixtures that their tests share."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "labs" if builds_labs(file) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


LabOf = Callable[..., Lab]
"""The arguments of a `Lab`, but its name."""


@pytest.fixture(scope="session")
def needs_lab() -> None:
    """Found out by building one."""
    try:
        with Lab(hosts=1, name=f"t{os.getpid()}-0"):
            pass
    except LabError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def standing_labs(needs_lab: None) -> Iterator[LabOf]:
    """One for each shape that is asked for, up until the end of the session."""
    standing: dict[str, Lab] = {}
    with ExitStack() as stack:

        def lab_of(**shape: Any) -> Lab:
            key = repr(sorted(shape.items()))
            if key not in standing:
                name = f"t{os.getpid()}-shared-{len(standing)}"
                standing[key] = stack.enter_context(Lab(**shape, name=name))
            return standing[key]

        yield lab_of


@pytest.fixture
def lab_of(standing_labs: LabOf) -> Iterator[LabOf]:
    """A lab of a shape, which other tests use, too: its links are restored after each."""
    used: list[Lab] = []

    def lab_of(**shape: Any) -> Lab:
        used.append(standing_labs(**shape))
        return used[-1]

    yield lab_of
    for lab in used:
        lab.restore()

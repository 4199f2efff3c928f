"""The rules of the suite itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.cli.command import thalweg
from tests.cpu_limit import cpu_seconds
from tests.examples import AT_MOST, examples

BURN = """
import os, subprocess, sys, time
import pytest

BURN = "import time\\nwhile time.process_time() < 0.3: pass"

def burn():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def shared():
    burn()

def test_itself():
    burn()

def test_its_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)

@pytest.mark.slow
def test_slow():
    burn()

def test_waits():
    time.sleep(0.3)

def test_shares(shared):
    pass

def test_fails():
    burn()
    assert not "its own failure"
"""


def test_a_case_that_takes_too_much_cpu_fails_unless_it_is_slow(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = slow\ncpu_limit = 0.2")
    pytester.makepyfile(BURN)
    reports = pytester.inline_run("-p", "tests.cpu_limit").getreports("pytest_runtest_logreport")
    told = {report.head_line: report.longreprtext for report in reports if report.when == "call"}
    for name in ("test_itself", "test_its_child"):
        assert re.match(
            r"this case took \d\.\d s of CPU, and may take 0\.2; make it cheaper, or mark it slow",
            told.pop(name),
        )
    assert "its own failure" in told.pop("test_fails")
    assert told == dict.fromkeys(["test_slow", "test_waits", "test_shares"], "")


def test_what_a_command_takes_counts() -> None:
    before = cpu_seconds()
    thalweg("plans")
    assert cpu_seconds() > before


def test_quick_properties_draw_few_examples() -> None:
    assert examples(3).max_examples == 3
    assert examples(500).max_examples in (AT_MOST, 500)  # by the profile
    here = Path(__file__)
    for file in here.parent.rglob("test_*.py"):
        if file != here:
            found = re.findall(r"settings\(.*max_examples", file.read_text())
            assert not found, f"{file} bypasses the profiles; write `examples(count)`"


def test_ids_of_cases_are_the_same_in_every_process(request: pytest.FixtureRequest) -> None:
    """Two processes that share the tests compare what they collected."""
    pid = os.getpid()
    for item in request.session.items:
        assert str(pid) not in item.nodeid

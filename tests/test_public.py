"""The public names exist, and importing them needs no torch."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PACKAGES = [
    "thalweg",
    "thalweg.codes",
    "thalweg.compress",
    "thalweg.facts",
    "thalweg.probing",
    "thalweg.report",
    "thalweg.schedules",
    "thalweg.training",
    "thalweg.transports",
    "thalweg.workloads",
]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_public_names_are_there(name: str) -> None:
    package = importlib.import_module(name)
    assert len(set(package.__all__)) == len(package.__all__) > 0
    assert all(hasattr(package, public) for public in package.__all__)


def test_the_pure_half_needs_no_torch() -> None:
    program = "import sys, thalweg.report, thalweg.cli.main; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)

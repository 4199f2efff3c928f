from __future__ import annotations

import subprocess
import sys

WITHOUT = """
import sys
sys.modules["pyroute2"] = None
import thalweg.bench.comparison, thalweg.bench.training, thalweg.bench.scenario
from thalweg.errors import LabError
try:
    from thalweg.lab import Lab
except LabError as error:
    print(error.remedy)
"""


def test_only_a_lab_needs_pyroute2_which_is_for_linux() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--workers N" in done.stdout

"""Trainers of others over the backend thalweg: as they are, with real processes, beside Gloo.

`make test-trainers` installs them, and runs this."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "trainers"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")
TRAINERS = {"accelerate": TORCHRUN, "lightning": (), "ray": (), "transformers": TORCHRUN}
SECONDS = 240
RANK = re.compile(r"rank (\d): norm (\d+\.\d+)")


@cache
def output(name: str, backend: str) -> str:
    """What the example prints, on both streams."""
    if find_spec(name) is None:
        pytest.skip(f"{name} isn't installed: run make test-trainers")
    ended = subprocess.run(
        [sys.executable, *TRAINERS[name], str(EXAMPLES / f"with_{name}.py"), backend],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    # A Gloo thread that ends after the interpreter aborts torch's own process (see the backend).
    assert ended.returncode == 0 or backend == "gloo", ended.stdout
    return ended.stdout


def norms(name: str, backend: str) -> dict[str, str]:
    """The norm of the parameters by rank: twelve digits of it."""
    return dict(RANK.findall(output(name, backend)))


@pytest.mark.parametrize("name", TRAINERS)
def test_it_ends_where_it_ends_over_gloo(name: str) -> None:
    """Two ranks have one order of addition, so the results are equal. Each rank has other samples,
    so replicas that nothing synchronises would differ."""
    found = norms(name, "thalweg")
    assert sorted(found) == ["0", "1"]
    assert found["0"] == found["1"]
    assert found == norms(name, "gloo")


@pytest.mark.parametrize("name", [name for name in TRAINERS if name != "ray"])
def test_it_says_that_it_is_thalweg(name: str) -> None:
    """Ray keeps what its workers log in files."""
    assert output(name, "thalweg").count("backend thalweg, plan auto(allow=exact): 2 workers") == 1

from __future__ import annotations

import json
from pathlib import Path
from shlex import split

import pytest

from tests.cli.command import thalweg


@pytest.mark.slow
def test_exact_plans_train_as_ddp_does(tmp_path: Path) -> None:
    done = thalweg(
        *split("verify ring 'gc(stragglers=1)' local_sgd --model digits --workers 2 --steps 30"),
        *("--variant", "plain", "--variant", "bf16 parameters", "--json", "-"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)["rows"]
    assert [row["sync"] for row in rows] == ["ring", "gc(stragglers=1)", "local_sgd"] * 2
    for row in rows:
        assert row["ok"]
        assert row["identical"] == (row["promise"] == "exact")
    assert all(row["difference"] <= 1e-5 for row in rows[:2])
    assert rows[2]["difference"] > 1e-5  # a local step each is something else


def test_a_model_that_is_not_the_same_on_all_ranks_is_found_out(tmp_path: Path) -> None:
    """Noise of each rank's own in what should be equal: DDP hides it, the comparison doesn't."""
    (tmp_path / "mine.py").write_text(
        "import os, torch\n"
        "from dataclasses import replace\n"
        "from thalweg.workloads import Job, parse_job\n"
        "def job() -> Job:\n"
        "    digits = parse_job('digits')\n"
        "    noise = torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))\n"
        "    def losses(model, batch):\n"
        "        x, y = batch\n"
        "        noisy = x + 0.1 * torch.randn(x.shape, generator=noise)\n"
        "        return digits.losses(model, (noisy, y))\n"
        "    return replace(digits, losses=losses)\n"
    )
    done = thalweg(
        *split("verify ring --model mine.py --workers 2 --steps 5 --variant plain"), cwd=tmp_path
    )
    assert done.returncode == 1
    assert "NOT OK" in done.stdout
    assert done.stderr == ("thalweg: ring (plain) didn't train as promised; see the table\n")


def test_an_unknown_variant(tmp_path: Path) -> None:
    done = thalweg("verify", "ring", "--variant", "plane", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no variant 'plane'; choose from plain, accumulation" in done.stderr

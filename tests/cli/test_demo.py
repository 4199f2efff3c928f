from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_explain import thalweg


def test_the_demo_checks_runs_and_draws_every_exact_plan(tmp_path: Path) -> None:
    done = thalweg("demo", "--json", "rows.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert all(row["right_on_all_ranks"] for row in rows)
    bound = {row["sync"]: row["bound_seconds"] for row in rows}
    once = 10e6 / 6.25e6  # seconds for all data through a 50mbit uplink
    assert bound["hierarchical"] == pytest.approx(once, rel=1e-3)
    assert bound["ddp"] == pytest.approx(7 * once, rel=1e-3)  # every hop of a ring by rank crosses
    drawings = {path.stem for path in (tmp_path / "thalweg-demo").glob("*.svg")}
    assert len(drawings) == len(rows)

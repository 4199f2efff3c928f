from __future__ import annotations

import json
from pathlib import Path
from shlex import split
from xml.etree import ElementTree as ET

from tests.cli.test_explain import thalweg
from thalweg.cli.demo import PLANS


def test_the_demo_trains_under_every_plan_and_draws_it(tmp_path: Path) -> None:
    done = thalweg(*split("demo --workers 4 --steps 25 --json rows.json"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["sync"] for row in rows] == list(PLANS)
    assert all(row["metric"] > 0.85 for row in rows)
    ddp = rows[0]
    for row in rows:
        # Workers side by side are one rack, in which dssync has one group, too.
        assert row["identical"] == (row["promise"] == "exact" or row["sync"] == "dssync")
        if row["promise"] == "exact":
            assert abs(row["metric"] - ddp["metric"]) < 0.01
    picture = ET.parse(tmp_path / "thalweg-demo" / "training.svg").getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert "Picture: thalweg-demo/training.svg" in done.stdout

from __future__ import annotations

import json
from pathlib import Path
from shlex import split
from statistics import fmean
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from tests.cli.command import thalweg
from thalweg.cli.main import app
from thalweg.errors import RunError


@pytest.mark.slow
def test_the_demo_predicts_trains_and_writes_a_page(tmp_path: Path) -> None:
    done = thalweg(*split("demo --workers 4 --steps 40 --json rows.json"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["sync"] for row in rows] == ["ddp", "auto"]
    ddp, auto = rows
    for row in rows:
        assert row["identical"]
        assert row["metric"] > 0.85
        assert abs(row["metric"] - ddp["metric"]) < 0.01
        assert 0 < row["low"] <= row["predicted"] <= row["high"]
    assert (ddp["chosen"], ddp["choices"]) == ("ddp", [])
    chosen = auto["choices"][-1]
    assert auto["chosen"] == chosen["sync"]
    later = auto["seconds"][chosen["step"] + 2 :]
    assert auto["seconds_per_step"] == pytest.approx(fmean(later))
    picture = ET.parse(tmp_path / "thalweg-demo" / "training.svg").getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    page = (tmp_path / "thalweg-demo" / "report.html").read_text()
    assert "Predicted and measured step times" in page
    assert auto["chosen"] in page
    assert "Picture: thalweg-demo/training.svg" in done.stdout
    assert "Page: thalweg-demo/report.html" in done.stdout


@pytest.mark.slow
def test_where_nothing_can_be_measured_it_trains_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RunError("links are down", "mend them")

    monkeypatch.setattr("thalweg.bench.calibrate_job.calibrate_at", failing)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, split("demo --workers 2 --steps 3 --json rows.json"))
    assert done.exit_code == 0, done.output
    assert "No predictions: calibration failed: links are down; mend them" in " ".join(
        done.output.split()
    )
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["sync"], row["predicted"], row["identical"]) for row in rows] == [
        ("ddp", None, True),
        ("auto", None, True),
    ]
    assert not (tmp_path / "thalweg-demo" / "report.html").exists()

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.cli.command import thalweg

SCENARIO = """
[lab]
racks = 2
hosts = 2
nic = "200mbit"
uplink = "50mbit"
[[lab.event]]
at_step = 10
action = "degrade"
rack = 0
rate = "10mbit"
[compute]
step = "5ms"
late = { probability = 0.1, delay = "20ms" }
[workload]
name = "JOB"
steps = 30
target = { metric = "accuracy", value = 0.5 }
evaluate_every = 6
[compare]
sync = ["ddp", "dssync"]
repeats = 2
warmup = 3
"""
COLUMNS = {
    "sync",
    "seconds_per_step",
    "predicted_seconds_per_step",
    "seconds_to_target",
    "seconds_all",
    "metric",
    "drift",
}


def written(folder: Path, job: str = "digits") -> str:
    (folder / "small.toml").write_text(SCENARIO.replace("JOB", job))
    return "small.toml"


def documented(*arguments: str, cwd: Path, code: int = 0) -> dict[str, Any]:
    done = thalweg("bench", "train", *arguments, "--json", "rows.json", cwd=cwd)
    assert done.returncode == code, done.stderr
    document: dict[str, Any] = json.loads((cwd / "rows.json").read_text())
    return document


def test_plans_take_turns_and_every_figure_is_there(tmp_path: Path) -> None:
    name = written(tmp_path)
    document = documented(name, "--workers-only", "--out", "drawn", cwd=tmp_path)
    settings, rows = document["settings"], document["rows"]
    assert (settings["workers"], settings["repeats"], settings["steps"]) == (4, 2, 30)
    assert settings["events"] == ["step 10: degrade rack 0 at 10mbit"]
    assert "no events happened" in settings["notes"][0]
    ddp, dssync = rows
    assert ddp.keys() == dssync.keys() >= COLUMNS
    for row in rows:
        assert row["error"] is row["predicted_seconds_per_step"] is None
        assert row["metric"] > 0.8
        assert 0.005 < row["seconds_per_step"] < row["seconds_to_target"] < row["seconds_all"]
        assert len(row["losses"]) == len(row["seconds"]) == 30
        assert [step for step, _ in row["repeats"][0]["evaluations"]] == [6, 12, 18, 24, 30]
        assert row["events"][0]["steps"] == []  # none happen without a lab
    assert (ddp["drift"], ddp["replicas_equal"], ddp["transport"]) == (0.0, True, "gloo")
    assert dssync["drift"] > 0
    assert (dssync["replicas_equal"], dssync["transport"]) == (False, "tcp")
    assert ET.parse(tmp_path / "drawn" / "small.svg").getroot().tag.endswith("svg")


def test_options_override_the_file_and_the_table_says_what_it_was(tmp_path: Path) -> None:
    options = ("--workers-only", "--sync", "ring", "--steps", "8", "--repeats", "1")
    done = thalweg("bench", "train", written(tmp_path), *options, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "small: digits on 4 workers, 8 steps, repeats: 1" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[2:3]] == ["ring"]
    assert "links had no rates, and no events happened" in done.stdout


@pytest.mark.slow
def test_a_plan_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    """DDP averages only what comes out of model(...), and this job goes round it."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "from torch.nn.functional import cross_entropy\n"
        "from thalweg.workloads import Job, parse_job\n"
        "def losses(model, batch):\n"
        "    return cross_entropy(model.forward(batch[0]), batch[1], reduction='none')\n"
        "def job() -> Job:\n"
        "    return replace(parse_job('digits'), losses=losses)\n"
    )
    name = written(tmp_path, "mine.py")
    ddp, dssync = documented(name, "--workers-only", "--steps", "6", cwd=tmp_path, code=1)["rows"]
    assert "the model wasn't called in this step" in ddp["error"]
    assert ddp.keys() >= COLUMNS
    assert {ddp[column] for column in COLUMNS - {"sync"}} == {None}
    assert dssync["error"] is None
    assert len(dssync["repeats"]) == 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("none.toml", "can't read none.toml: No such file or directory; name a TOML file"),
        ("small.toml --sync rign", "there is no plan 'rign'"),
        ("small.toml --sync dssync+topk", "dssync+topk is unsound: topk leaves out most of a"),
        ("small.toml --steps 3", "none of 3 steps is counted"),
        ("small.toml --repeats 0", "--repeats"),
    ],
)
def test_mistakes_are_one_line(arguments: str, line: str, tmp_path: Path) -> None:
    written(tmp_path)
    done = thalweg("bench", "train", "--workers-only", *arguments.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1

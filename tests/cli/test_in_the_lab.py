"""The commands that take `--lab`, and what they do where no lab can be had."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import split

import pytest

from tests.cli.command import thalweg


@pytest.mark.slow
@pytest.mark.usefixtures("needs_lab")
def test_collectives_have_a_bound_and_follow_the_racks(tmp_path: Path) -> None:
    """2 MB over 2 x 2 hosts: 2(N-1)/N S over a NIC, S over an uplink, whichever takes longer. Ranks
    go round the racks: torch's ring then crosses an uplink at every hop, and ours twice in all."""
    done = thalweg(
        *split("bench collectives --lab 2x2 --nic 200mbit --uplink 100mbit --bytes 2MB"),
        *split("--rank-order interleaved --sync ring --repeats 5 --json -"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["settings"]["workers"] == 4
    assert any("congestion" in note for note in document["settings"]["notes"])
    for row in document["rows"]:
        assert row["bound"] == pytest.approx(max(1.5 * 2e6 / 25e6, 2e6 / 12.5e6))
        assert 0 < row["fraction_of_bound"] < 1.1
        assert row["fraction_of_bound"] == pytest.approx(row["bound"] / row["median"])
        assert row["predicted"] > row["bound"]
        ratio = row["predicted"] / row["median"]
        assert row["predicted_over_measured"] == pytest.approx(ratio)
    gloo, *ours = document["rows"]
    assert all(gloo["predicted"] > 1.8 * row["predicted"] for row in ours)
    assert max(row["vs_gloo"] for row in document["rows"]) > 1.2


@pytest.mark.usefixtures("needs_lab")
def test_training_in_a_lab_from_a_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(
        '[[rack]]\nname = "a"\nnic = "1gbit"\nuplink = "500mbit"\nhosts = 2\n'
        '[[rack]]\nname = "b"\nnic = "1gbit"\nuplink = "500mbit"\nhosts = 1\n'
    )
    done = thalweg(
        *split("train digits --lab cluster.toml --sync hierarchical --steps 5 --json -"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    settings = json.loads(done.stdout)["settings"]
    assert settings["workers"] == 3
    assert settings["result"]["identical"]


SCENARIO = """
[lab]
racks = 2
hosts = 1
nic = "200mbit"
[[lab.event]]
at_step = 4
action = "ACTION"
host = 1
rate = "50mbit"
[workload]
name = "synthetic(params=100k)"
steps = 60
[compare]
sync = ["ddp", "ring"]
repeats = 1
warmup = 2
"""


@pytest.mark.usefixtures("needs_lab")
def test_a_scenario_with_an_event(tmp_path: Path) -> None:
    (tmp_path / "slower.toml").write_text(SCENARIO.replace("ACTION", "degrade"))
    done = thalweg(*split("bench train slower.toml --json rows.json"), cwd=tmp_path)
    assert done.returncode == 0
    assert all("neither authenticated nor encrypted" in line for line in done.stderr.splitlines())
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    bound = 4 * 100_000 * 8 / 50e6  # all of the model through the degraded NIC
    for row in rows:
        assert row["seconds_per_step"] > 0.9 * bound
        [event] = row["events"]
        assert all(step >= 4 for step in event["steps"])
    assert "congestion control" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("needs_lab")
def test_a_plan_that_does_not_survive_the_scenario_has_a_row_that_says_so(tmp_path: Path) -> None:
    other = '[[lab.event]]\nat_step = 4\naction = "kill"\nhost = 0\n'
    scenario = SCENARIO.replace("ACTION", "kill") + other  # and nobody is left
    (tmp_path / "death.toml").write_text(scenario)
    done = thalweg(*split("bench train death.toml --sync ring --json rows.json"), cwd=tmp_path)
    assert done.returncode == 1
    [row] = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["seconds_per_step"] is None
    assert row["error"].startswith("no worker finished")


@pytest.mark.parametrize(
    "command",
    [
        "lab up 1x2",
        "lab run --lab 1x2 -- true",
        "train digits --lab 1x2 --steps 2",
        "bench collectives --lab 1x2 --bytes 1MB --sync ring",
        "demo --lab 1x2",
    ],
)
def test_without_rights_one_line_says_what_is_missing_and_what_works(
    command: str, tmp_path: Path
) -> None:
    done = thalweg(*split(command), cwd=tmp_path, rights=False)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "the lab needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN)" in line
    assert "local workers without shaping" in line


def test_without_rights_the_demo_goes_on_without_a_lab(tmp_path: Path) -> None:
    done = thalweg(*split("demo --steps 3"), cwd=tmp_path, rights=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "digits on 4 local workers" in done.stdout
    assert "no lab, where links have limits: the lab needs root" in done.stdout

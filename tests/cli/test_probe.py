"""`thalweg probe` as a user runs it: on local workers, under torchrun, in a script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from shlex import split
from xml.etree import ElementTree as ET

import pytest

from tests.cli.command import thalweg
from thalweg.facts import read_cluster


@pytest.mark.parametrize("transport", ["tcp", "zeromq"])
def test_local_workers_share_a_host(transport: str, tmp_path: Path) -> None:
    done = thalweg(
        *split(f"probe --workers 3 --transport {transport} --out found/mine.toml --json rows.json"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "all workers are on one host" in done.stdout
    document = json.loads((tmp_path / "rows.json").read_text())
    [row] = document["rows"]
    assert (row["kind"], row["ranks"], row["nic_mbps"]) == ("host", [0, 1, 2], None)
    assert row["rtt_us"] > 0
    assert document["settings"]["transport"] == "tcp"
    assert document["settings"]["confidence"]["racks"] == "sure"
    cluster = read_cluster(tmp_path / "found" / "mine.toml")
    assert cluster.workers == 3
    ET.parse(tmp_path / "found" / "mine.svg")
    explained = thalweg("explain", "ring", "--cluster", "found/mine.toml", cwd=tmp_path)
    assert explained.returncode == 0


def test_one_worker_has_nothing_to_measure_and_still_a_file(tmp_path: Path) -> None:
    done = thalweg(*split("probe --workers 1"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "there is one worker, and nothing to measure" in done.stdout
    assert read_cluster(tmp_path / "cluster.toml").workers == 1


def test_under_torchrun_rank_0_tells(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "-m", "thalweg", "probe"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written: cluster.toml") == 1
    assert read_cluster(tmp_path / "cluster.toml").workers == 2


def test_in_a_script_all_ranks_get_the_same(tmp_path: Path) -> None:
    script = (
        "import thalweg\nc = thalweg.probe()\nprint(c.workers, c.latency, c == thalweg.probe(c))"
    )
    (tmp_path / "script.py").write_text(script)
    done = thalweg(*split("run --workers 3 script.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert len(printed) == 3
    assert len(set(printed)) == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "no workers are given"),
        ("--workers 2 --lab 1x2", "--workers and --lab are both given"),
        ("--workers 2 --nic 1gbit", "rates, --rank-order and --latency describe a lab"),
        ("--workers 2 --transport udp", "there is no transport 'udp'"),
        (
            "--workers 2 --transport c10d",
            "the transport c10d was retired, because it was slower than tcp; leave transport out",
        ),
        ("--workers 2 --timeout soon", "'soon' is not a duration"),
        ("--workers 2 --cluster absent.toml", "can't read absent.toml"),
        ("--workers 3 --cluster two.toml", "the cluster has 2 workers, and 3 were started"),
        ("--workers 1 --out two.toml/mine.toml", "can't write two.toml/mine.toml"),
    ],
)
def test_mistakes_are_one_line(arguments: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text('[[rack]]\nname = "a"\nhosts = 2\n')
    done = thalweg("probe", *arguments.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_launcher_says_where_workers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    done = thalweg("probe", "--workers", "2")
    assert done.returncode == 2
    assert "can't be used under a launcher" in done.stderr

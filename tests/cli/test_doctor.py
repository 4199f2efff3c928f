"""`thalweg doctor` as a user runs it: alone, on local workers, in a lab, under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from shlex import split
from typing import Any

import pytest
from rich.console import Console

from tests.cli.command import thalweg
from thalweg.cli.measure import outcome_text, paste_text, table
from thalweg.doctor import Finding

ALONE = {"environment", "interface", "host name", "name lookups", "open files", "bfloat16", "disk"}
TOGETHER = ALONE | {"ranks", "reachability", "rates", "clocks", "versions", "secret", "threads"}
FINE = Finding(check="disk", verdict="ok", detail="9 GB free [or so]")
WRONG = Finding(check="open files", verdict="fail", detail="few", remedy="ulimit").at(3, "node2")
ODD = Finding(check="clocks", verdict="warn", detail="off", remedy="ntp").at(1, "node1")


def document(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    assert list(found) == ["command", "version", "settings", "rows"]
    assert found["command"] == "doctor"
    for row in found["rows"]:
        assert list(row)[:4] == ["check", "verdict", "detail", "remedy"]
        assert row["verdict"] in ("ok", "warn", "fail")
        assert row["detail"]
        assert row["remedy"] or row["verdict"] == "ok"
    return found


def test_alone_it_looks_at_this_host(tmp_path: Path) -> None:
    done = thalweg(*split("doctor --json rows.json"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "this host, alone" in done.stdout
    found = document((tmp_path / "rows.json").read_text())
    checks = {row["check"] for row in found["rows"]}
    assert checks >= ALONE
    assert "reachability" not in checks
    assert found["settings"]["workers"] == 1
    assert found["settings"]["environment"]["torch"] in done.stdout


def test_the_block_to_paste_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THALWEG_SECRET", "nobody may read this")
    done = thalweg("doctor", "--paste", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, *block, last = done.stdout.splitlines()
    assert (first, last) == ("----- copy from here -----", "----- to here -----")
    assert any(line.startswith("- torch: ") for line in block)
    assert "- THALWEG_SECRET=(set, not shown)" in block
    assert "nobody may read this" not in done.stdout


def test_what_is_wrong_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    done = thalweg(*split("doctor --json -"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    wrong = [row for row in document(done.stdout)["rows"] if row["verdict"] == "fail"]
    assert [(row["check"], row["detail"]) for row in wrong] == [
        ("interface", "GLOO_SOCKET_IFNAME names the interface 'ib7', which this host doesn't have")
    ]
    assert wrong[0]["remedy"].startswith("use one of ")


def test_local_workers(tmp_path: Path) -> None:
    done = thalweg(*split("doctor --workers 2 --json rows.json"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 local workers" in done.stdout
    rows = {row["check"]: row for row in document((tmp_path / "rows.json").read_text())["rows"]}
    assert rows.keys() >= TOGETHER
    assert rows["reachability"]["detail"] == "all 2 ordered pairs of ranks reach each other"


@pytest.mark.usefixtures("needs_lab")
def test_a_healthy_lab_is_all_fine(tmp_path: Path) -> None:
    command = "doctor --lab 2x2 --nic 200mbit --uplink 200mbit --json rows.json"
    done = thalweg(*split(command), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = document((tmp_path / "rows.json").read_text())
    assert {row["verdict"] for row in found["rows"]} == {"ok"}
    rows = {row["check"]: row["detail"] for row in found["rows"]}
    assert rows.keys() >= TOGETHER
    assert rows["ranks"] == "all 4 joined, on 4 hosts"
    assert rows["rates"].startswith("all ordered pairs of hosts: median 1")
    assert "checks are ok" in done.stdout
    assert found["settings"]["notes"]


@pytest.mark.parametrize(
    ("variables", "code", "wrong"),
    [
        pytest.param({}, 0, [], marks=pytest.mark.slow),
        ({"THALWEG_CLUSTER": "absent.toml"}, 1, [("cluster file", [0, 1])]),
    ],
    ids=["healthy", "a failed check"],
)
def test_under_torchrun_rank_0_tells_and_a_failed_check_is_exit_code_1(
    variables: dict[str, str], code: int, wrong: list[tuple[str, list[int]]], tmp_path: Path
) -> None:
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 -m thalweg doctor --json -"
    done = subprocess.run(
        [sys.executable, *split(command)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        check=False,
    )
    assert done.returncode == code, done.stderr
    found = document(done.stdout)
    assert {row["check"] for row in found["rows"]} >= TOGETHER
    failed = [row for row in found["rows"] if row["verdict"] == "fail"]
    assert [(row["check"], row["ranks"]) for row in failed] == wrong
    assert "torchrun, rank 0 of 2" in found["settings"]["environment"]["launcher"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--workers 2 --lab 1x2", "--workers and --lab are both given"),
        ("--workers 2 --nic 1gbit", "rates, --rank-order and --latency describe a lab"),
        ("--nic 1gbit", "no workers are given"),
        ("--workers 2 --timeout soon", "'soon' is not a duration"),
    ],
)
def test_mistakes_are_one_line(arguments: str, line: str, tmp_path: Path) -> None:
    done = thalweg("doctor", *arguments.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "can't be used under a launcher"),
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not"),
    ],
)
def test_launchers_that_say_it_otherwise(
    variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = thalweg("doctor", "--workers", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr


def test_a_table_has_the_remedy_below_what_was_found() -> None:
    out = StringIO()
    Console(file=out, width=100).print(table([WRONG, FINE], "2 workers"))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert lines[0] == "2 workers"
    assert lines[2].split() == ["fail", "open", "files", "rank", "3", "on", "node2:", "few"]
    assert lines[3] == "-> ulimit"
    assert lines[4].endswith("9 GB free [or so]")  # brackets are no markup


def test_the_outcome_in_a_line() -> None:
    assert outcome_text([FINE]) == "All 1 checks are ok."
    assert outcome_text([WRONG, ODD, FINE, FINE]) == "1 failed, 1 warnings, 2 ok."


def test_a_block_to_paste_has_what_is_wrong_in_full() -> None:
    lines = paste_text(["- torch: 2"], [WRONG, FINE]).splitlines()
    assert lines[1] == "- torch: 2"
    assert "- fail open files: rank 3 on node2: few; ulimit" in lines
    assert "- ok: disk" in lines

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import thalweg


def test_a_row_for_each_fault_and_the_seeds(tmp_path: Path) -> None:
    done = thalweg(
        *("chaos", "--workers", "3", "--faults", "2", "--seed", "4", "--kinds", "restart,kill"),
        *("--bound", "1min", "--json", "-"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["command"] == "chaos"
    assert [row["fault"] for row in document["rows"]] == [0, 1]
    assert {row["kind"] for row in document["rows"]} <= {"kill", "restart"}
    [run] = document["settings"]["runs"]
    assert (run["sync"], run["seed"], run["violations"]) == ("ring", 4, [])
    assert (tmp_path / run["history"]).exists()
    assert document["settings"]["kinds"] == ["kill", "restart"]


def test_a_violation_ends_it_with_the_command_to_have_it_again(tmp_path: Path) -> None:
    done = thalweg(
        *("chaos", "--workers", "2", "--faults", "1", "--seed", "4", "--kinds", "restart"),
        *("--bound", "1ms", "--hold", "2s"),
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "progress: fault 0: restart rank" in done.stderr
    assert " in 1 of 1 run, the first: " in done.stderr
    assert "ring, seed 4: 1 fault in " in done.stdout
    again = "--sync ring --faults 1 --seed 4 --bound 0.001s --hold 2s --kinds restart"
    assert f"`thalweg chaos --workers 2 {again}`" in done.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "no workers are given; give exactly one of --workers N and --lab RxH"),
        (("--workers", "4", "--lab", "2x2"), "--workers and --lab are both given"),
        (("--workers", "4", "--kinds", "cut"), "cut needs the links of a lab; give --lab RxH"),
        (("--workers", "4", "--kinds", "fire"), "there is no fault 'fire'; choose from kill"),
        (("--workers", "4", "--kinds", ","), "--kinds is empty"),
        (("--workers", "4", "--nic", "1gbit"), "rates, --rank-order and --latency describe a lab"),
        (("--workers", "1"), "a run of one worker can't survive a fault"),
        (("--workers", "4", "--sync", "rign"), "rign"),
        (("--workers", "3", "--sync", "gc(stragglers=5)"), "use stragglers=2 or less"),
        (("--workers", "4", "--for", "soon"), "soon"),
        (("--workers", "4", "--hold", "on"), "on"),
    ],
)
def test_what_cannot_be_done(options: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    done = thalweg("chaos", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert problem in done.stderr
    assert not list(tmp_path.glob("thalweg-chaos/*/history.jsonl"))

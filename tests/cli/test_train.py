"""`thalweg train` as a user runs it: local workers, torchrun, checkpoints, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import thalweg

THALWEG = [sys.executable, "-m", "thalweg"]


def trained(*arguments: str, cwd: Path) -> dict[str, Any]:
    done = thalweg("train", *arguments, "--json", "-", cwd=cwd)
    said = [line for line in done.stderr.splitlines() if "straggler" not in line]
    assert (done.returncode, said) == (0, [])
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["command"] == "train"
    return document


def test_rows_per_step_and_a_result(tmp_path: Path) -> None:
    document = trained("digits", "--workers", "2", "--sync", "tree", "--steps", "30", cwd=tmp_path)
    rows, result = document["rows"], document["settings"]["result"]
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert all(row["seconds"] > 0 for row in rows)
    assert result["final_loss"] == rows[-1]["loss"] < rows[0]["loss"] / 4
    assert result["metric"] > 0.9
    assert result["seconds_per_step"] > 0
    assert result["identical"]


def test_where_the_time_went_and_records_of_it(tmp_path: Path) -> None:
    where = ("--workers", "2", "--records", "records")
    document = trained("digits", *where, "--steps", "20", cwd=tmp_path)
    result = document["settings"]["result"]
    assert [row["rank"] for row in result["ranks"]] == [0, 1]
    for row in result["ranks"]:
        assert row["steps"] == 20
        parts = row["computing"] + row["exposed"] + row["settled"]
        assert parts == pytest.approx(row["seconds"], rel=0.001)
    assert result["late"] == []
    done = thalweg("report", "records", "--json", "-", cwd=tmp_path)
    assert [row["rank"] for row in json.loads(done.stdout)["rows"]] == [0, 1]


@pytest.mark.slow
def test_under_torchrun_rank_0_tells(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    job = ["-m", "thalweg", "train", "digits", "--steps", "5", "--json", "rows.json"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "3", *job],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("replicas: bitwise identical") == 1
    document = json.loads((tmp_path / "rows.json").read_text())
    assert document["settings"]["workers"] == 3
    assert len(document["rows"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["ring", pytest.param("gc(stragglers=1)", marks=pytest.mark.slow)])
def test_stopped_and_resumed_is_as_if_never_stopped(sync: str, tmp_path: Path) -> None:
    common = ("digits", "--workers", "4", "--sync", sync)
    whole = trained(*common, "--steps", "14", cwd=tmp_path)["settings"]["result"]
    for steps in ("4", "11", "14"):  # the epoch ends at 11
        last = trained(*common, "--steps", steps, "--checkpoint", "kept", cwd=tmp_path)
    assert [row["step"] for row in last["rows"]] == [12, 13, 14]
    assert last["settings"]["result"]["fingerprint"] == whole["fingerprint"]
    if sync == "ring":  # under a code, a step's loss is that of the ranks that took it
        assert last["settings"]["result"]["final_loss"] == whole["final_loss"]


@pytest.mark.slow
def test_interrupted_it_saves_and_goes_on(tmp_path: Path) -> None:
    common = ("digits", "--workers", "2", "--steps", "150")
    whole = trained(*common, cwd=tmp_path)["settings"]["result"]
    process = subprocess.Popen(
        [*THALWEG, "train", *common, "--checkpoint", "kept", "--save-every", "20"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(tmp_path.glob("kept/step-*")) and process.poll() is None:
        pass  # it has begun
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "thalweg: interrupted; nothing was left running\n"
    saved = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "kept").iterdir())
    assert 20 <= saved < 150
    rest = trained(*common, "--checkpoint", "kept", cwd=tmp_path)
    assert rest["rows"][0]["step"] == saved + 1
    assert rest["settings"]["result"]["fingerprint"] == whole["fingerprint"]


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ("digits", 2, "no workers are given; give exactly one of --workers N and --lab RxH"),
        ("digitz --workers 2", 2, "there is no job 'digitz'"),
        ("digits --workers 2 --sync rign", 2, "there is no plan 'rign'"),
        ("digits --workers 2 --sync ring+dgc", 2, "dgc has a momentum of 0.9, and the optimizer"),
        (
            "digits --workers 8 --sync codedreduce(fanout=2,stragglers=2)",
            2,
            "a parent of 2 can't do",
        ),
        (
            "digits --workers 2 --sync gc@transport=c10d",
            2,
            "the transport c10d was retired, because it was slower than tcp; leave transport out",
        ),
        ("digits --workers 3 --batch 2", 2, "a batch of 2 has no sample for each of 3 workers"),
        ("digits --workers 3 --sync gc(stragglers=3)", 2, "3 workers can't do without 3"),
        ("digits --workers 2 --save-every 5", 2, "--save-every has nowhere to save"),
        ("digits --workers 2 --timeout soon", 2, "'soon' is not a duration"),
        ("digits --workers 2 --steps 2 --checkpoint /dev/null/x", 1, "/dev/null"),
        ("mine.py --workers 2", 2, "mine.py"),
    ],
)
def test_mistakes_are_one_line(arguments: str, code: int, line: str, tmp_path: Path) -> None:
    done = thalweg("train", *arguments.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("thalweg: ")
    assert line in done.stderr


def test_a_job_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "from thalweg.workloads import Job, parse_job\n"
        "def job() -> Job:\n"
        "    return replace(parse_job('digits'), name='mine', batch=64)\n"
    )
    document = trained("mine.py", "--workers", "2", "--steps", "3", cwd=tmp_path)
    assert (document["settings"]["workload"], document["settings"]["batch"]) == ("mine", 64)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_worker_that_is_killed_is_named_and_the_others_go_on(
    restarts: int, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "from dataclasses import replace\n"
        "from thalweg.workloads import Job, parse_job\n"
        "def job() -> Job:\n"
        "    digits = parse_job('digits')\n"
        "    steps = []\n"
        "    def losses(model, batch):\n"
        "        steps.append(1)\n"
        "        first = os.environ['THALWEG_RESTARTS'] == '0'\n"
        "        if os.environ['RANK'] == '2' and len(steps) == 4 and first:\n"
        "            os.kill(os.getpid(), 9)\n"
        "        return digits.losses(model, batch)\n"
        "    return replace(digits, losses=losses)\n"
    )
    options = ("--workers", "4", "--timeout", "60s", "--restarts", str(restarts))
    done = thalweg("train", "mine.py", *options, "--json", "-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    goes_on = "it is restarted" if restarts else "the others continue"
    assert f"[2] rank 2 was killed by SIGKILL (out of memory?); {goes_on}" in done.stderr
    document = json.loads(done.stdout)
    assert [row["step"] for row in document["rows"]] == list(range(1, 61))
    assert document["settings"]["result"]["lost"] == ([] if restarts else [2])

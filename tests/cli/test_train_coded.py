"""`thalweg train` under a code, with workers that die."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import thalweg

DIES = """
import os, signal
from dataclasses import replace
from pathlib import Path
from thalweg.workloads import Job, parse_job

def job() -> Job:
    digits = parse_job("digits")
    calls = 0
    def losses(model, batch):
        nonlocal calls
        calls += 1
        if calls == {call} and int(os.environ.get("RANK", 0)) in {ranks} and not done():
            os.kill(os.getpid(), signal.SIGKILL)
        return digits.losses(model, batch)
    def done():
        return Path("died").exists()
    return replace(digits, losses=losses)
"""


def trained(*arguments: str, cwd: Path, lost: Collection[int] = ()) -> dict[str, Any]:
    done = thalweg("train", *arguments, "--json", "-", cwd=cwd)
    assert done.returncode == 0, done.stderr
    said = "[{0}] rank {0} was killed by SIGKILL (out of memory?); the others continue"
    of_deaths = [line for line in done.stderr.splitlines() if "was killed" in line]
    assert sorted(of_deaths) == [said.format(rank) for rank in lost]
    assert "Traceback" not in done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def dying(folder: Path, *ranks: int, call: int) -> None:
    (folder / "mine.py").write_text(DIES.format(ranks=set(ranks), call=call))


@pytest.mark.slow
def test_what_died_and_what_was_lost_by_it_are_in_the_result(tmp_path: Path) -> None:
    dying(tmp_path, 2, 3, call=4)
    sync = "gc(stragglers=1, beyond=partial)"
    options = ("mine.py", "--workers", "4", "--sync", sync, "--steps", "8")
    document = trained(*options, cwd=tmp_path, lost=[2, 3])
    result = document["settings"]["result"]
    assert result["lost"] == [2, 3]
    assert result["identical"]
    approximate = {int(step): part for step, part in result["approximate"].items()}
    assert set(approximate) >= {3, 4, 5, 6, 7}
    assert set(approximate.values()) == {0.5}


@pytest.mark.slow
def test_within_the_tolerance_nothing_is_lost(tmp_path: Path) -> None:
    options = ("--workers", "7", "--sync", "codedreduce(fanout=3, stragglers=1)", "--steps", "14")
    dying(tmp_path, call=0)
    calm = trained("mine.py", *options, cwd=tmp_path)["settings"]["result"]
    dying(tmp_path, 1, 3, call=6)
    document = trained("mine.py", *options, cwd=tmp_path, lost=[1, 3])
    result = document["settings"]["result"]
    assert [row["step"] for row in document["rows"]] == list(range(1, 15))
    assert result["lost"] == [1, 3]
    assert result["approximate"] == {}
    assert result["fingerprint"] == calm["fingerprint"]


@pytest.mark.slow
def test_without_its_root_the_others_go_on_and_save(tmp_path: Path) -> None:
    options = ("mine.py", "--workers", "4", "--sync", "gc(stragglers=1)", "--steps")
    dying(tmp_path, 0, call=9)
    saving = ("--checkpoint", "kept", "--save-every", "3")
    document = trained(*options, "14", *saving, cwd=tmp_path, lost=[0])
    assert [row["step"] for row in document["rows"]] == list(range(1, 15))
    assert document["settings"]["result"]["lost"] == [0]
    assert document["settings"]["result"]["identical"]
    (tmp_path / "died").touch()
    rest = trained(*options, "17", *saving, cwd=tmp_path)
    assert [row["step"] for row in rest["rows"]] == list(range(15, 18))

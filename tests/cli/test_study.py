"""`thalweg study compression` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import split

import pytest

from tests.cli.command import thalweg


def test_a_table_and_rows(tmp_path: Path) -> None:
    done = thalweg(*split("study compression --json rows.json"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())  # lines are as long as fits
    assert "(constants of the paper's V100)" in words
    assert "the paper reports 6 of more than 200" in words
    assert "everybody gathers all signs here" in words
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
    document = json.loads((tmp_path / "rows.json").read_text())
    rows, settings = document["rows"], document["settings"]
    assert document["command"] == "study compression"
    assert len(rows) >= 200
    assert all(
        row.keys() == {"model", "batch", "workers", "gbps", "method", "vs_ddp"} for row in rows
    )
    won = sum(row["vs_ddp"] > 1 for row in rows)
    assert settings["wins"] == {"wins": won, "of": len(rows)}
    fast = [row for row in rows if row["gbps"] >= 10]
    won = sum(row["vs_ddp"] > 1 for row in fast)
    assert settings["data_centre"] == {"wins": won, "of": len(fast)}
    assert f"in {won} of {len(fast)} on links of 10 Gbit/s and more" in done.stdout
    assert sum(each["of"] for each in settings["by_gbps"]) == len(rows)
    assert sum(each["wins"] for each in settings["by_method"].values()) == settings["wins"]["wins"]
    methods = {row["method"] for row in rows}
    assert {each["method"] for each in settings["break_even"]} == methods
    for each in settings["break_even"]:
        assert (each["pays"] == "below") == (each["pays_below_gbps"] is not None)
    assert settings["sufficient_ratio"]


def test_yours_at_rates_of_ones_own() -> None:
    done = thalweg(
        *split("study compression --constants yours --bandwidth 500mbit --bandwidth 2gbit --json -")
    )
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert {row["gbps"] for row in document["rows"]} == {0.5, 2.0}
    assert document["settings"]["assumed"]
    assert document["settings"]["data_centre"] == {"wins": 0, "of": 0}
    assert "randomblock(ratio=0.01)" in {row["method"] for row in document["rows"]}


def test_the_title_says_whose_constants() -> None:
    """Without a machine file they aren't the user's own."""
    done = thalweg(*split("study compression --constants yours --bandwidth 10gbit"))
    words = " ".join(done.stdout.split())
    assert "(constants of one core of an AMD EPYC)" in words
    assert "votes go in two shots here" in words
    assert "--machine FILE takes yours" in words


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--constants theirs", "--constants"),
        ("--bandwidth 10", "'10' is not a rate"),
        ("--machine here.toml", "the paper's constants need no machine"),
        ("--constants yours --machine nowhere.toml", "nowhere.toml"),
    ],
)
def test_mistakes_are_one_line(options: str, line: str, tmp_path: Path) -> None:
    done = thalweg("study", "compression", *split(options), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert done.stderr.count("\n") == 1

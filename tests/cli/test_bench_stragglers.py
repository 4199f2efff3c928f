"""`thalweg bench stragglers` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import split
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.cli.command import thalweg

COLUMNS = {"scheme", "mean", "p50", "p95", "p99", "exact", "iterations", "bound", "cr_speedup"}


def documented(options: str, cwd: Path) -> dict[str, Any]:
    done = thalweg("bench", "stragglers", *split(options), "--json", "rows.json", cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    document: dict[str, Any] = json.loads((cwd / "rows.json").read_text())
    return document


@pytest.mark.slow
@pytest.mark.usefixtures("needs_lab")
def test_four_schemes_in_a_small_lab(tmp_path: Path) -> None:
    document = documented(
        "--tree 2x2 --bytes 4KB --late 0.1 --delay 50ms --compute 0s --iterations 20 --tables held",
        tmp_path,
    )
    settings, rows = document["settings"], document["rows"]
    assert (settings["workers"], settings["bytes"], settings["seed"]) == (6, 4000, 0)
    assert any("congestion" in note for note in settings["notes"])
    assert settings["tables"] == {}
    assert [row["scheme"] for row in rows] == ["umw", "gc", "rar", "cr"]
    for row in rows:
        assert row.keys() >= COLUMNS
        assert (row["exact"], row["iterations"]) == (True, 20)
        assert 0 < row["p50"] <= row["p95"] <= row["p99"]
    umw, _, rar, cr = rows
    assert umw["beyond"] == rar["beyond"] > 0
    assert umw["bound"] == pytest.approx(6 * 4000 * 8 / 100e6)
    assert min(umw["mean"], rar["mean"]) > umw["waits"]
    assert umw["cr_speedup"] == pytest.approx(umw["mean"] / cr["mean"])
    picture = tmp_path / "thalweg-bench" / "stragglers-2x2.svg"
    assert ET.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("needs_lab")
def test_the_other_tables_in_a_small_lab(tmp_path: Path) -> None:
    document = documented(
        "--tree 4x1 --bytes 4KB --late 0.1 --delay 50ms --iterations 10 --budget 5s "
        "--tables delays,compute --tables pauses --plot drawn.svg",
        tmp_path,
    )
    assert document["rows"] == []  # the setting itself wasn't asked for
    tables = document["settings"]["tables"]
    assert {name: len(rows) for name, rows in tables.items()} == {
        "delays": 16,
        "compute": 8,
        "pauses": 5,
    }
    assert all(row["exact"] for rows in tables.values() for row in rows)
    assert [row["mean_vs_none_late"] for row in tables["delays"][:4]] == [1.0] * 4
    assert tables["pauses"][-1]["stragglers"] == 3
    assert (tmp_path / "drawn.svg").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("needs_lab")
def test_codedreduce_is_the_fastest_of_84_workers(tmp_path: Path) -> None:
    document = documented(
        "--tree 4x3 --stragglers 1 --bytes 200KB --nic 100mbit --late 0.05 --delay 2s "
        "--compute 0s --iterations 10 --tables held",
        tmp_path,
    )
    means = {row["scheme"]: row["mean"] for row in document["rows"]}
    assert all(row["exact"] for row in document["rows"])
    assert min(means, key=lambda scheme: means[scheme]) == "cr"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--tree four", "'four' is not a tree; write it like 4x3: four children, three layers"),
        ("--tree 4x3 --stragglers 4", "a parent of 4 children can't tolerate 4 stragglers"),
        ("--stragglers 2", "give --stragglers 0, 1 or 3"),
        ("--stragglers=-1", "--stragglers"),
        ("--late 1.5", "1.5 is not a probability; give one from 0 to 1"),
        ("--late often", "--late"),
        ("--bytes 4B", "too short for two classes; give at least 8B"),
        ("--bytes 10B", "10 bytes aren't a whole number of float32"),
        ("--bytes 1GB", "give messages of at most 17MB"),
        ("--nic fast", "'fast' is not a rate"),
        ("--delay 2", "'2' is not a duration"),
        ("--delay 1h", "give a delay and a compute time of at most 60s"),
        ("--iterations 0", "--iterations"),
        ("--tables held,all", "there is no table 'all'; choose from held, delays, compute"),
        ("--tables ,", "--tables is empty"),
    ],
)
def test_mistakes_are_one_line(options: str, line: str, tmp_path: Path) -> None:
    done = thalweg("bench", "stragglers", *split(options), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_rights_one_line_says_what_is_missing(tmp_path: Path) -> None:
    done = thalweg(*split("bench stragglers --tree 2x2"), cwd=tmp_path, rights=False)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "the lab needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN)" in line

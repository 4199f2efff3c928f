from __future__ import annotations

import json
from pathlib import Path
from shlex import split
from statistics import median

import pytest

from tests.cli.command import thalweg


def test_a_row_for_each_plan_and_always_gloo(tmp_path: Path) -> None:
    done = thalweg(
        *split("bench collectives --workers 3 --bytes 300KB --repeats 3 --json -"),
        *("--sync", "ring", "--sync", "dssync @ transport=zeromq", "--sync", "ddp"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    rows = document["rows"]
    assert [(row["sync"], row["transport"]) for row in rows] == [
        ("gloo", "gloo"),
        ("ring", "tcp"),
        ("dssync @ transport=zeromq", "tcp"),
        ("ddp", "gloo"),
    ]
    for row in rows:
        assert len(row["seconds"]) == 3
        assert row["median"] == median(row["seconds"])
        assert row["vs_gloo"] == pytest.approx(rows[0]["median"] / row["median"])
        assert (row["bound"], row["fraction_of_bound"]) == (None, None)
        assert (row["predicted"], row["predicted_over_measured"]) == (None, None)
    assert document["settings"]["bytes"] == 300_000


def test_with_encryption_and_without(tmp_path: Path) -> None:
    done = thalweg(
        *split("bench collectives --workers 3 --bytes 3MB --repeats 2 --curve --json -"),
        *("--sync", "ring"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    transports = [row["transport"] for row in json.loads(done.stdout)["rows"]]
    assert transports == ["gloo", "tcp, encrypted", "tcp, plain"]


@pytest.mark.parametrize(("model", "parameters"), [("digits", 563_722), ("resnet50", 25_557_032)])
def test_a_model_instead_of_bytes(model: str, parameters: int, tmp_path: Path) -> None:
    done = thalweg(
        *split(f"bench collectives --workers 2 --model {model} --sync tree --repeats 1 --json -"),
        cwd=tmp_path,
    )
    assert json.loads(done.stdout)["settings"]["bytes"] == 4 * parameters


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--workers 2 --sync ring", "neither --bytes nor --model is given"),
        (
            "--workers 2 --sync ring --bytes 1MB --model digits",
            "--bytes and --model are both given",
        ),
        ("--workers 2 --sync ring --model resnet5", "there is no model 'resnet5'; there are"),
        ("--workers 2 --sync gossip+int8 --bytes 1MB", "gossip+int8 is unsound: gossip adds"),
        (
            "--workers 2 --sync ring@transport=c10d --bytes 1MB",
            "the transport c10d was retired, because it was slower than tcp; leave transport out",
        ),
        ("--workers 2 --sync rinq --bytes 1MB", "there is no plan 'rinq'"),
        ("--workers 0 --sync ring --bytes 1MB", "--workers"),
        ("--workers 2 --bytes 1MB", "--sync"),
    ],
)
def test_mistakes_are_one_line(arguments: str, line: str, tmp_path: Path) -> None:
    done = thalweg("bench", "collectives", *arguments.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1

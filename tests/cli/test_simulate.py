"""`thalweg simulate` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import thalweg
from tests.cli.test_advise import MODEL, PARTS
from thalweg.catalog import parse_plan
from thalweg.cli.predict import bar_of
from thalweg.predict import Breakdown, Estimate

PLACE = ["--lab", "2x2", "--nic", "1gbit", "--uplink", "1gbit", "--model", "model.toml"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "model.toml").write_text(MODEL)
    return tmp_path


def rows(here: Path, *options: str) -> list[dict[str, Any]]:
    done = thalweg("simulate", *PLACE, *options, "--json", "-", cwd=here)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["command"] == "simulate"
    found: list[dict[str, Any]] = document["rows"]
    return found


def test_a_ring_by_hand(here: Path) -> None:
    """One bucket of 8.4 MB, ready after 30 ms of computing, takes 2 3/4 of 67.1 ms and 6 messages
    of 100 us; the optimizer 1 ms."""
    [row] = rows(here, "--sync", "ring")
    seconds = 1.5 * 8 * 2**20 * 8 / 1e9
    assert (row["sync"], row["workers"], row["form"]) == ("ring", 4, "replay")
    assert row["seconds"] == pytest.approx(0.031 + seconds, abs=2e-3)
    assert row["closed_form"] == pytest.approx(row["seconds"], rel=0.02)
    assert row["exchange"]["seconds"] == pytest.approx(seconds, abs=1e-3)
    [bucket] = row["buckets"]
    assert bucket["ready"] == bucket["start"] == pytest.approx(0.030)
    assert bucket["end"] == pytest.approx(row["seconds"] - 0.001)
    busiest = row["links"][0]
    assert busiest["bytes"] == pytest.approx(1.5 * 8 * 2**20)
    assert busiest["utilisation"] == pytest.approx(seconds / row["seconds"], rel=0.01)


@pytest.mark.parametrize(
    "plan",
    [
        "ddp", "umw", "hierarchical+int8", "codedreduce(fanout=2)", "lgc", "asp", "dssync",
        "local_sgd(every=4)", "hierarchical(compress=between)+topk @ bucket=1MB",
    ],
)  # fmt: skip
def test_every_kind_of_plan(here: Path, plan: str) -> None:
    [row] = rows(here, "--sync", plan)
    assert row["sync"] == plan
    assert row["seconds"] == pytest.approx(sum(row[part] for part in PARTS))
    assert row["low"] <= row["seconds"] <= row["high"]


def test_several_plans_and_what_is_printed(here: Path) -> None:
    done = thalweg("simulate", *PLACE, "--sync", "ring", "--sync", "gossip", cwd=here)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout
    assert said.index("ring: ") < said.index("gossip: ")
    assert "░ transfer" in said
    assert "buckets on rank" in said
    assert "busiest links" in said
    assert "closed form: " in said
    assert "Assumed: " in said


def test_assumptions_about_a_codec_are_printed(here: Path) -> None:
    arguments = ("simulate", *PLACE, "--sync", "ring+powersgd(rank=3)")
    said = " ".join(thalweg(*arguments, cwd=here).stdout.split())
    assert "compressors are as fast as with the arguments that were measured" in said


def test_the_same_what_ifs(here: Path) -> None:
    [as_it_is], [otherwise] = (
        rows(here, "--sync", "ring", *more) for more in ((), ("--bandwidth", "100mbit"))
    )
    assert otherwise["transfer"] == pytest.approx(10 * as_it_is["transfer"], rel=0.05)


def test_a_large_cluster_has_the_closed_form_alone(here: Path) -> None:
    [row] = rows(here, "--sync", "double_tree", "--members", "10000")
    assert (row["workers"], row["form"]) == (10_000, "closed form")
    assert (row["buckets"], row["links"], row["exchange"]) == ([], [], None)


def test_a_bar_in_proportion() -> None:
    parts = Breakdown(compute=0.5, transfer=0.25, waiting=0.25)
    estimate = Estimate(plan=parse_plan("ring"), parts=parts, low=1, high=1, form="replay")
    bar, said = bar_of(estimate, 8).splitlines()
    assert bar == "████░░··"
    assert said == "█ compute 500 ms   ░ transfer 250 ms   · waiting 250 ms"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sync", "rign"], "did you mean ring"),
        (["--sync", "auto"], "auto has no step time"),
        (["--sync", "gc(stragglers=1)", "--members", "5000"], "no closed form, and 5000 workers"),
        (["--sync", "ring", "--faster", "0"], "0 times as fast"),
        (["--sync", "ring", "--measured-only"], "not measured: 100us latency"),
        ([], "Missing option '--sync'"),
    ],
)
def test_mistakes_are_one_line(here: Path, options: list[str], said: str) -> None:
    done = thalweg("simulate", *PLACE, *options, cwd=here)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1

"""`thalweg report` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import thalweg
from tests.recorded import Run

CLUSTER = """
[[rack]]
name = "left"
hosts = 2
nic = "1gbit"
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    return Run(ranks=4, steps=40, slow={2: 3.0}, until=25).written(folder)


def test_the_table_and_stragglers(records: Path) -> None:
    done = thalweg("report", str(records))
    assert (done.returncode, done.stderr) == (0, "")
    first, headings, *lines = done.stdout.splitlines()
    assert first.startswith("steps 0 to 39 of 4 ranks: ")
    assert headings.split() == [
        "rank", "host", "steps", "step", "time", "compute", "exposed", "overlapped", "encoding",
        "blocked", "exposed", "%",
    ]  # fmt: skip
    assert [line.split()[:3] for line in lines[:4]] == [
        [str(rank), f"host{rank}", "39"] for rank in range(4)
    ]
    assert lines[4].startswith("straggler: rank 2 on host2: compute time ")
    assert " from step 10 to 25; costs " in lines[4]
    assert lines[5] == "step 39: incident: it is over (rank 0)"
    assert lines[6] == "clock error at most 200 us"


def test_json(records: Path) -> None:
    done = thalweg("report", str(records), "--json", "-", "--steps", "5:9")
    document = json.loads(done.stdout)
    assert document["command"] == "report"
    settings = document["settings"]
    assert settings["records"] == str(records)
    assert settings["steps"] == [5, 9]
    assert (settings["late"], settings["notes"]) == ([], [])
    assert [each["aligned_by"] for each in settings["clocks"]] == ["clock"] * 4
    for rank, row in enumerate(document["rows"]):
        assert (row["rank"], row["host"], row["steps"]) == (rank, f"host{rank}", 5)
        parts = row["computing"] + row["exposed"] + row["waiting"]
        assert parts == pytest.approx(row["seconds"])
        assert row["share"] == pytest.approx(row["exposed"] / row["seconds"])
    whole = json.loads(thalweg("report", str(records), "--json", "-").stdout)["settings"]
    [late] = whole["late"]
    assert (late["kind"], late["who"], late["first"], late["last"]) == ("compute", ["2"], 10, 25)
    assert whole["notes"] == [{"step": 39, "topic": "incident", "text": "it is over", "ranks": [0]}]


def test_all_that_can_be_written(records: Path, tmp_path: Path) -> None:
    pytest.importorskip("perfetto")
    pytest.importorskip("tensorboard")
    done = thalweg(
        "report", str(records), "--trace", "out/run.pftrace", "--tensorboard", "board",
        "--page", "run.html", cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-3:] == [
        "Trace: out/run.pftrace (open it in ui.perfetto.dev)",
        "Scalars: tensorboard --logdir board",
        "Page: run.html",
    ]
    assert (tmp_path / "out" / "run.pftrace").stat().st_size > 10_000
    assert len(list((tmp_path / "board").iterdir())) == 4
    assert "Stragglers" in (tmp_path / "run.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere"], "no records can be read in nowhere: No such file or directory; name"),
        (["."], "there are no records in .; name the folder that was given as records= or"),
        (["{}", "--steps", "7"], "'7' is no range of steps; write it like 100:200, 100: or :200"),
        (["{}", "--steps", "9:5"], "'9:5' has no step in it; write the smaller one first"),
        (["{}", "--steps", "900:"], "no step from 900: is on record; give steps between 0 and 39"),
        (["{}", "--trace", "a.xml"], "a.xml has no ending of a trace format; use one"),
        (["{}", "--cluster", "two.toml"], "the cluster has no rank 2; it has 0 to 1"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    records: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "two.toml").write_text(CLUSTER)
    done = thalweg("report", *(each.format(records) for each in options), cwd=tmp_path)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"thalweg: {message}")


def test_records_without_a_step(tmp_path: Path) -> None:
    folder = Run(ranks=2, steps=0).written(tmp_path / "records")
    done = thalweg("report", str(folder))
    assert done.returncode == 2
    assert "have no step; train for longer" in done.stderr

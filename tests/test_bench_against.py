"""`scripts/bench-against`: which runs it pairs, what it makes of them, and what it leaves behind.

Most of it is run in a small repository whose `thalweg` prints rows at once, so that the values of
both revisions are known; once in this one, for real.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "bench-against"
COMMANDS = """\
import json, os, sys, time
from pathlib import Path

arguments = sys.argv[1:]
bench = arguments[1]
with open({log!r}, "a") as log:
    print({name!r}, bench, file=log)
if {name!r} == "old" and bench == {fails_in_old!r}:
    sys.exit("thalweg: no bench " + bench)
if {name!r} == "new" and bench == {fails_in_new!r}:
    sys.exit("thalweg: it broke")
if {name!r} == "new" and bench == {hangs_in_new!r}:
    time.sleep(600)
rows = [
    {{"sync": "gloo", "transport": "gloo", "median": 9.0}},
    {{"sync": "ring @ transport=zeromq", "transport": "tcp", "median": {seconds}}},
]
if bench == "stragglers":
    rows = [{{"scheme": "umw", "p50": 9.0}}, {{"scheme": "cr", "p50": {seconds}}}]
Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps({{"rows": rows}}))
"""


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


class Project:
    """Two revisions: the commands of the old one take 2 s, they say, those of the new one 3 s."""

    def __init__(
        self, folder: Path, *, old_lacks: str = "", new_breaks: str = "", new_hangs: str = ""
    ) -> None:
        self.folder = folder / "project"
        self.log = folder / "log"
        self._git("init", "--quiet", str(self.folder))
        (self.folder / "scripts").mkdir()
        shutil.copy(SCRIPT, self.folder / "scripts")
        for name, seconds in (("old", 2.0), ("new", 3.0)):
            package = self.folder / "src" / "thalweg"
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").touch()
            text = COMMANDS.format(
                name=name,
                seconds=seconds,
                log=str(self.log),
                fails_in_old=old_lacks,
                fails_in_new=new_breaks,
                hangs_in_new=new_hangs,
            )
            (package / "__main__.py").write_text(text)
            self._git("-C", str(self.folder), "add", ".")
            self._git("-C", str(self.folder), "commit", "--quiet", "--message", name)

    def start(self, *options: str, own_group: bool = False) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "scripts/bench-against", *options],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=own_group,
        )

    def run(self, *options: str) -> tuple[int, str, str]:
        process = self.start(*options)
        stdout, stderr = process.communicate()
        return process.returncode, stdout, stderr

    def is_clean(self) -> bool:
        """No second worktree is left, and nothing is changed in the first."""
        listed = self._git("-C", str(self.folder), "worktree", "list")
        return len(listed.splitlines()) == 1 and not self._git(
            "-C", str(self.folder), "status", "--porcelain"
        )

    def _git(self, *arguments: str) -> str:
        who = [option for key in ("name", "email") for option in ("-c", f"user.{key}=tests")]
        done = subprocess.run(["git", *who, *arguments], capture_output=True, text=True, check=True)
        return done.stdout


def test_median_and_spread_are_of_the_ratios_of_pairs(script: dict[str, Any]) -> None:
    """A machine that is half as fast in one pair doesn't change that pair's ratio."""
    row = script["Row"](name="ring", unit="s", old=[1.0, 2.0, 1.0], new=[1.5, 3.0, 2.0])
    assert row.ratios == [1.5, 1.5, 2.0]
    document = row.document()
    assert (document["median"], document["least"], document["most"]) == (1.5, 1.5, 2.0)
    assert row.cells() == ["ring", "1 s", "2 s", "1.500", "1.500 .. 2.000"]


def test_without_pairs_there_is_no_ratio(script: dict[str, Any]) -> None:
    row = script["Row"](name="ring", unit="s", new=[1.0], reason="cannot run on 1234567: no ring")
    document = row.document()
    assert (document["ratios"], document["median"], document["least"]) == ([], None, None)
    assert row.cells() == ["ring", "-", "1 s", "-", "cannot run on 1234567: no ring"]


def test_the_two_revisions_take_turns(tmp_path: Path) -> None:
    project = Project(tmp_path)
    code, stdout, stderr = project.run(
        *("HEAD~", "HEAD", "--only", "lab", "--only", "codedreduce"),
        *("--repeats", "3", "--json", "../rows.json"),
    )
    assert code == 0, stderr
    turns = ["old", "new", "new", "old", "old", "new"]
    called = [f"{name} {bench}" for bench in ("collectives", "stragglers") for name in turns]
    assert project.log.read_text().splitlines() == called
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["bench"], row["ratios"]) for row in rows] == [
        ("ring", [1.5, 1.5, 1.5]),
        ("codedreduce", [1.5, 1.5, 1.5]),
    ]
    assert "1.500 .. 1.500" in stdout
    assert len(stderr.splitlines()) == 12  # a line of progress for each run
    assert project.is_clean()


def test_what_the_old_revision_cannot_run_is_said_in_its_row(tmp_path: Path) -> None:
    project = Project(tmp_path, old_lacks="stragglers")
    code, stdout, _ = project.run("HEAD~", "--only", "lab", "--only", "codedreduce")
    assert code == 0
    _, ring, coded = stdout.splitlines()
    assert ring.split()[:6] == ["ring", "2", "s", "3", "s", "1.500"]
    assert coded.startswith("codedreduce  -")
    assert coded.endswith("thalweg: no bench stragglers")
    assert project.log.read_text().count("new stragglers") == 1


def test_a_bench_that_fails_on_the_new_side_fails_the_comparison(tmp_path: Path) -> None:
    project = Project(tmp_path, new_breaks="stragglers")
    code, stdout, _ = project.run("HEAD~", "--only", "lab", "--only", "codedreduce")
    assert code == 1
    assert "1.500" in stdout.splitlines()[1]
    assert stdout.splitlines()[2].endswith("thalweg: it broke")
    assert project.is_clean()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_an_interrupted_comparison(
    number: signal.Signals, tmp_path: Path
) -> None:
    project = Project(tmp_path, new_hangs="collectives")
    process = project.start("HEAD~", "--only", "lab")
    until = monotonic() + 60
    while not project.log.exists() or "new" not in project.log.read_text():
        assert monotonic() < until
        sleep(0.02)
    assert not project.is_clean()
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert project.is_clean()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_worktree_is_left_if_its_making_is_interrupted(
    number: signal.Signals, tmp_path: Path
) -> None:
    """A hook of git runs when the files are there, but before git is done."""
    project = Project(tmp_path)
    hook = project.folder / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/in-hook\nsleep 600 > /dev/null 2>&1\n")
    hook.chmod(0o755)
    process = project.start("HEAD~", "--only", "lab", own_group=True)
    until = monotonic() + 60
    while not (tmp_path / "in-hook").exists():
        assert monotonic() < until
        sleep(0.02)
    os.killpg(process.pid, number)  # as a terminal does: to git, too
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (128 + number, "")
    assert project.is_clean()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("",), "a revision has no name; give one like HEAD~5"),
        (("HEAD~", "--json", "nosuch/rows.json"), "there is no folder nosuch; make it, or "),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    options: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    project = Project(tmp_path)
    code, stdout, stderr = project.run(*options, "--only", "lab")
    assert (code, stdout) == (2, "")
    assert problem in stderr
    assert not project.log.exists()


def test_a_revision_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    code, stdout, stderr = Project(tmp_path).run("nowhere")
    assert (code, stdout) == (2, "")
    assert len(stderr.splitlines()) == 1
    assert "no such revision" in stderr


@pytest.mark.timeout(300)
def test_this_revision_against_itself(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("these sources aren't in a repository of git")
    options = ["--quick", "--repeats", "1", "--only", "compressed", "--json", "rows.json"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "HEAD", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["bench"] for row in rows] == ["ring+int8", "ring+powersgd(rank=4)"]
    for row in rows:
        assert row["ratios"] == [row["new"][0] / row["old"][0]]
        assert row["reason"] == ""

"""Whole scripts in which one rank fails: every other says so in one line, and ends."""

from __future__ import annotations

import atexit
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training import workers
from thalweg.errors import UnitError, WorkerFailed
from thalweg.launch.launcher_variables import LAUNCHER_VARIABLE
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.training import attach, shutdown

assert workers  # which imports in advance what forks need
CULPRIT = 2
SIZE = 4
SECONDS = 60.0  # for starting everything on a busy machine
SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import thalweg

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 1))
{wrap}
optimizer = torch.optim.SGD(model.parameters(), 0.001)
run = thalweg.attach(model, optimizer, plan={sync!r}, timeout={timeout!r})
with {block}:
    for step in range(40):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        if run.rank == {culprit} and step == 9:
            {misfortune}
        optimizer.step()
print("done")
"""
NO_BLOCK = "torch.enable_grad()"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
RAISES = "raise ValueError('boom')"
ENDS = "sys.exit(0)"
WRONG = "run.mean(torch.zeros(3)), run.switch('rinf')"
IN_DDP = (
    "torch.distributed.init_process_group(); model = nn.parallel.DistributedDataParallel(model)"
)


Launch = Callable[[Path], "Ended"]


@dataclass(frozen=True)
class Ended:
    """How a run of a script ended: what each rank said, the last line of all, the exit code."""

    said: list[tuple[int, str]]
    last: str
    code: int

    def of(self, rank: int) -> list[str]:
        return [line for who, line in self.said if who == rank]


def thalweg_run(script: Path) -> Ended:
    launch = [sys.executable, "-m", "thalweg", "run", "--workers", str(SIZE), str(script)]
    return _launched(launch, r"\[(\d)\] (.*)")


def torchrun(script: Path) -> Ended:
    options = ["--nproc-per-node", str(SIZE), "--standalone", "--tee", "3"]
    launch = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    return _launched(launch, r"\[default(\d)\]:(.*)")


def _launched(launch: list[str], line: str) -> Ended:
    process = subprocess.run(
        launch,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
    )
    lines = process.stdout.splitlines() + process.stderr.splitlines()
    found = [match for text in lines if (match := re.match(line, text))]
    said = [(int(match[1]), match[2]) for match in found if "[thalweg] plan " not in match[2]]
    return Ended(said, process.stderr.splitlines()[-1], process.returncode)


def forked(script: Path, grace: float = 2.5, *, launcher: str | None = "thalweg") -> Ended:
    """As `thalweg run` does it, without the time that four interpreters take to start; with what
    each rank itself says, of which the supervisor tells the cause alone. Without `launcher`, as
    another launcher does it."""
    said: list[tuple[int, str]] = []

    def hear(rank: int, message: dict[str, Any]) -> None:
        said.extend((rank, line) for line in message["said"])

    def work(rank: int, report: SendMessage) -> None:
        if launcher is None:
            del os.environ[LAUNCHER_VARIABLE]
            sys.excepthook = sys.__excepthook__
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit:
            pass
        except BaseException as error:
            sys.last_value = error  # as the interpreter does before it calls the hook
            with redirect_stderr(StringIO()) as own:
                sys.excepthook(*_without_frames_above(script))
            report({"said": own.getvalue().splitlines()})
            sys.stderr.write(own.getvalue())
            atexit._run_exitfuncs()
            sys.exit(1)

    with pytest.raises(WorkerFailed) as failure:
        run_workers(
            SIZE,
            work,
            timeout=SECONDS,
            grace=grace,
            on_message=hear,
            on_line=lambda *_: None,
        )
    return Ended(said, str(failure.value), failure.value.exit_code)


patiently = partial(forked, grace=10.0)
by_another = partial(forked, launcher=None)


def _without_frames_above(script: Path) -> Any:
    kind, error, traceback = sys.exc_info()
    while traceback is not None and traceback.tb_frame.f_code.co_filename != str(script):
        traceback = traceback.tb_next
    return kind, error, traceback


def ended(
    folder: Path,
    misfortune: str,
    *,
    sync: str = "ring",
    timeout: str = "10min",
    wrap: str = "",
    block: str = NO_BLOCK,
    launch: Launch = forked,
) -> Ended:
    script = folder / "script.py"
    script.write_text(
        SCRIPT.format(
            misfortune=misfortune,
            sync=sync,
            timeout=timeout,
            culprit=CULPRIT,
            wrap=wrap,
            block=block,
        )
    )
    return launch(script)


def assert_survivors_name_the_error(run: Ended) -> None:
    """In the last line of the traceback, as any error has one without `thalweg run`."""
    for rank in set(range(SIZE)) - {CULPRIT}:
        assert run.of(rank)[0] == "Traceback (most recent call last):"
        told = f"PeerFailed: rank {CULPRIT} aborted: ValueError: boom"
        assert told in run.of(rank)[-1], run.of(rank)


def assert_survivors_blame(run: Ended) -> None:
    """In one line each, without a traceback."""
    assert run.code == 1, run
    for rank in set(range(SIZE)) - {CULPRIT}:
        line = "\n".join(run.of(rank))
        assert re.fullmatch(rf"thalweg: rank {rank}: .*", line), line
        assert f"rank {CULPRIT}" in line, line


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["ring", "tree"])
def test_killed_and_the_others_go_on(sync: str, tmp_path: Path) -> None:
    run = ended(tmp_path, KILLED, sync=sync, launch=thalweg_run)
    assert run.code == 0, run
    assert run.of(CULPRIT) == [
        f"rank {CULPRIT} was killed by SIGKILL (out of memory?); the others continue"
    ]
    others = [rank for rank in range(SIZE) if rank != CULPRIT]
    assert all("done" in run.of(rank) for rank in others)
    ranks = ", ".join(map(str, others))
    goes_on = rf".*: membership epoch 2 resumes at step (9|10) with ranks {ranks}"
    assert any(re.fullmatch(goes_on, line) for line in run.of(others[0])), run


@pytest.mark.slow
def test_killed(tmp_path: Path) -> None:
    """Where connections are torch's, which don't come back."""
    run = ended(tmp_path, KILLED, timeout="2s", wrap=IN_DDP, launch=patiently)
    assert_survivors_blame(run)
    assert f"rank {CULPRIT} was killed by SIGKILL" in run.last


@pytest.mark.slow
def test_stopped(tmp_path: Path) -> None:
    """It neither answers nor ends; neighbours of its neighbours know who it is nevertheless."""
    run = ended(tmp_path, STOPPED, timeout="2s", wrap=IN_DDP)
    assert_survivors_blame(run)
    others = set(range(SIZE)) - {CULPRIT}
    assert all(f"rank {CULPRIT} doesn't answer" in run.of(rank)[0] for rank in others)


@pytest.mark.slow
def test_raises_under_torchrun(tmp_path: Path) -> None:
    run = ended(tmp_path, RAISES, launch=torchrun)
    assert_survivors_name_the_error(run)
    assert run.of(CULPRIT)[-1] == "ValueError: boom"


@pytest.mark.parametrize("block", [NO_BLOCK, "run"])
def test_raises_under_another_launcher(block: str, tmp_path: Path) -> None:
    """The error is that of the script's last line, or leaves the block of the run."""
    run = ended(tmp_path, RAISES, block=block, launch=by_another)
    assert_survivors_name_the_error(run)
    assert run.of(CULPRIT)[-1] == "ValueError: boom"


def test_installs_no_hook_under_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHER_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    model = nn.Linear(1, 1)
    with attach(model, torch.optim.SGD(model.parameters(), 0.1), plan="ring"):
        assert sys.excepthook is sys.__excepthook__


@pytest.mark.parametrize("sync", ["ring", "dssync"])
def test_raises(sync: str, tmp_path: Path) -> None:
    run = ended(tmp_path, RAISES, sync=sync)
    assert_survivors_blame(run)
    for rank in set(range(SIZE)) - {CULPRIT}:
        assert f"rank {CULPRIT} aborted: ValueError: boom" in run.of(rank)[0]
    own = [line.removeprefix(f"[rank{CULPRIT}]: ") for line in run.of(CULPRIT)]  # torch's habit
    assert own[0] == "Traceback (most recent call last):"
    assert own[-1] == "ValueError: boom"
    assert f"rank {CULPRIT}" in run.last


def test_a_mistake_of_usage(tmp_path: Path) -> None:
    """One line on the rank that made it, too."""
    run = ended(tmp_path, WRONG)
    assert_survivors_blame(run)
    (line,) = run.of(CULPRIT)
    assert line.startswith(f"thalweg: rank {CULPRIT}: there is no plan 'rinf'; there are")


@pytest.mark.slow
@pytest.mark.parametrize(("misfortune", "timeout"), [(RAISES, "10min"), (STOPPED, "2s")])
def test_in_a_ddp_object(misfortune: str, timeout: str, tmp_path: Path) -> None:
    run = ended(tmp_path, misfortune, timeout=timeout, wrap=IN_DDP)
    assert_survivors_blame(run)


def test_ends_before_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a loader with fewer batches would: they don't wait until their timeout."""
    monkeypatch.setattr(shutdown, "LEAVE_TIMEOUT_SECONDS", 1.0)
    run = ended(tmp_path, ENDS)
    assert_survivors_blame(run)
    assert "its part of the run ended after step 9" in run.of(0)[0]
    assert run.of(CULPRIT) == []


def test_before_it_knows_its_rank(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHER_VARIABLE, "thalweg")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(shutdown._OneLine, "watched", [])
    shutdown.errors_in_one_line()
    with pytest.raises(UnitError) as found:
        attach(nn.Linear(1, 1), None, plan="ring", timeout="soon")
    sys.excepthook(found.type, found.value, found.tb)
    assert capfd.readouterr().err.startswith("thalweg: 'soon' is not a duration; ")

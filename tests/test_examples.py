"""The examples run, in real processes, show what they are for, and are small diffs of one script.

All of them run in forks of this process, which needn't load torch anew. One also runs as a
command; under `make test-all` every one does, as its first lines say.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path
from socket import gethostname

import pytest
import sklearn.datasets  # once here, not in every fork

from tests.cli.command import thalweg
from thalweg.launch.supervisor import SendMessage, run_workers

assert sklearn.datasets
EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
BASES = {  # of the others: attach
    "one_line": "plain",
    **dict.fromkeys(("backend", "ddp_object", "own_loader"), "ddp"),
}
NO_DIFFS = ("attach", "ddp", "plain", "predict")  # bases, and what trains nothing
MOST_CHANGED = 20  # lines
WORKERS = {"groups": 4, "survive": 4}  # of the others: 3
ALONE_ON_EACH_RANK = ("plain", "one_line")
TORCH_ABORTS = "terminate called without an active exception"
"""Seen once, from the example that is torch's alone, and not again. Probably what is described in
https://github.com/pytorch/pytorch/pull/179291: a Gloo thread that still holds a work while the
interpreter ends. Nothing of ours runs in that process."""


def accuracies(text: str) -> list[str]:
    return re.findall(r"accuracy (\d\.\d+)", text)


def troubles(lines: list[str]) -> list[str]:
    """The lines on stderr that report a problem: not plans, their predictions and stragglers."""
    usual = (
        "[thalweg] plan ",
        "[thalweg] backend thalweg, plan ",
        "[thalweg] from step ",
        ": predicted ",
        "no cluster file",
        "[thalweg] straggler: ",
        "[thalweg] straggler resolved: ",
    )
    return [line for line in lines if not any(words in line for words in usual)]


def in_forks(name: str, folder: Path, size: int) -> dict[int, str]:
    """What each rank of this example prints; lines of stderr begin with that word."""
    printed: dict[int, list[str]] = {rank: [] for rank in range(size)}
    kept = []  # until the fork ends: torch may hang where a process group that it left is freed

    def work(rank: int, report: SendMessage) -> None:
        os.chdir(folder)
        kept.append(runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__"))

    def on_line(rank: int, stream: str, line: str) -> None:
        printed[rank].append(f"{stream}: {line}" if stream == "stderr" else line)

    killed = name == "survive"
    run_workers(
        size, work, timeout=100, on_line=on_line, survives=killed, restarts=3 if killed else 0
    )
    return {rank: "\n".join(lines) for rank, lines in printed.items()}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "predict"])
def test_what_it_prints(name: str, tmp_path: Path) -> None:
    size = WORKERS.get(name, 3)
    printed = in_forks(name, tmp_path, size)
    everything = "\n".join(printed.values())
    reached = accuracies(everything)
    assert all(float(accuracy) > 0.9 for accuracy in reached), everything
    assert len(reached) == (size if name in ALONE_ON_EACH_RANK else 1), everything
    if name != "survive":  # which tells what happened while it runs
        assert not troubles([line for line in everything.splitlines() if "stderr: " in line])
    if name in EXPECTED:
        EXPECTED[name](printed)


def names_the_late_one(printed: dict[int, str]) -> None:
    told = rf"^rank 1 on {re.escape(gethostname())}: compute time .+ \(median of .+ per step"
    assert re.search(told, printed[0], re.MULTILINE)
    assert re.search(r"^rank +host +steps +step time +compute +exposed", printed[0], re.MULTILINE)


def chooses(printed: dict[int, str]) -> None:
    """Whatever it chooses: that it did at step 8, and why."""
    assert re.search(r"^from step 8: .+ \(.+\)$", printed[0], re.MULTILINE)


def leaves_out(printed: dict[int, str]) -> None:
    """Something of every matrix, and nothing of the vectors, which go as they are."""
    left_out = re.findall(r"left out of (\S+): (\S+)", printed[0])
    assert {name for name, _ in left_out} == {"0.weight", "2.weight"}
    assert all(float(norm) > 0 for _, norm in left_out)


def is_late_and_left_behind(printed: dict[int, str]) -> None:
    """Nobody waited: there were more steps than it was late for."""
    match = re.search(r"late (\d+) times in (\d+) steps", printed[1])
    assert match is not None
    late, steps = map(int, match.groups())
    assert 0 < late < steps == 75


def differ(printed: dict[int, str]) -> None:
    match = re.search(r"replicas were (\S+) from their mean", printed[0])
    assert match is not None
    assert float(match.group(1)) > 0


def has_switched_and_stopped(printed: dict[int, str]) -> None:
    match = re.search(r"ended after step (\d+) under ring\+bf16$", printed[0], re.MULTILINE)
    assert match is not None
    assert 3 * 15 < int(match.group(1)) < 50 * 15


def has_lost_one_and_got_it_back(printed: dict[int, str]) -> None:
    """Rank 2 left and came, or came back before it was missed."""
    told = re.findall(r"^from step (\d+) on (.+): ", printed[0], re.MULTILINE)
    assert told[0][0] == "20"
    assert told[-1][1].endswith("with (2,) again")


def sends_what_a_ring_sends(printed: dict[int, str]) -> None:
    """2 (N-1)/N of the gradients, and what is exchanged to begin with."""
    gradients = 4 * (64 * 256 + 256 + 256 * 10 + 10)
    match = re.search(r"messages, (\d+) bytes per step", printed[0])
    assert match is not None
    assert 4 / 3 < int(match.group(1)) / gradients < 1.1 * 4 / 3


def is_one_model(printed: dict[int, str]) -> None:
    assert len({accuracies(text)[0] for text in printed.values()}) == 1


def are_side_by_side(printed: dict[int, str]) -> None:
    assert "racks: [(0, 1, 2)]" in printed[0]


def has_timed(printed: dict[int, str]) -> None:
    assert re.search(r"backward \d+\.\d ms, then \d+\.\d ms of averaging", printed[0])


EXPECTED: dict[str, Callable[[dict[int, str]], None]] = {
    "auto": chooses,
    "compressed": leaves_out,
    "groups": differ,
    "measured": are_side_by_side,
    "one_line": is_one_model,
    "survive": has_lost_one_and_got_it_back,
    "switching": has_switched_and_stopped,
    "timings": has_timed,
    "who_is_late": names_the_late_one,
    "traffic": sends_what_a_ring_sends,
    "wait_for_nobody": is_late_and_left_behind,
}


def test_what_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is run. The uplinks are what is slow, so who spares them is faster."""
    runpy.run_path(str(EXAMPLES / "predict.py"), run_name="__main__")
    *lines, verdict = capsys.readouterr().out.splitlines()
    seconds = {line.split(": ")[0]: float(line.split(": ")[1].split()[0]) for line in lines}
    assert list(seconds) == sorted(seconds, key=lambda sync: -seconds[sync])
    assert next(iter(seconds)) == "ddp"
    assert verdict.startswith("Use ")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_DIFFS])
def test_it_is_a_small_diff(name: str) -> None:
    base = BASES.get(name, "attach")
    texts = [(EXAMPLES / f"{one}.py").read_text().splitlines() for one in (base, name)]
    lines = [line[0] for line in unified_diff(*texts, n=0, lineterm="")][2:]
    assert lines.count("+") + lines.count("-") <= MOST_CHANGED


@pytest.mark.parametrize("name", NAMES)
def test_its_first_lines_start_it(name: str) -> None:
    """All but the one that is started as any script is."""
    text = (EXAMPLES / f"{name}.py").read_text()
    assert name == "plain" or f"examples/{name}.py\n" in text.split('"""')[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "predict"])
def test_as_its_first_lines_say(name: str, tmp_path: Path) -> None:
    size = str(WORKERS.get(name, 3))
    options = ["--restarts", "3"] if name == "survive" else []
    command = ["run", "--workers", size, *options, str(EXAMPLES / f"{name}.py")]
    done = thalweg(*command, cwd=tmp_path)
    if name == "ddp" and TORCH_ABORTS in done.stderr:
        done = thalweg(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert name == "survive" or not troubles(done.stderr.splitlines())
    reached = accuracies(done.stdout)
    assert all(float(accuracy) > 0.9 for accuracy in reached)
    assert len(reached) == (int(size) if name in ALONE_ON_EACH_RANK else 1)
    if name == "survive":
        assert shlex.join(command[3:5]) in (EXAMPLES / "survive.py").read_text()


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--standalone", str(EXAMPLES / "attach.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(accuracies(done.stdout)) == 1


def test_as_a_command(tmp_path: Path) -> None:
    done = thalweg("run", "--workers", "1", str(EXAMPLES / "attach.py"), cwd=tmp_path)
    assert (done.returncode, troubles(done.stderr.splitlines())) == (0, [])
    assert len(accuracies(done.stdout)) == 1


def test_a_plain_script_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "one_line.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert len(accuracies(done.stdout)) == 1


@pytest.mark.slow
def test_what_was_finished_is_not_trained_again(tmp_path: Path) -> None:
    """The same bits come out of a checkpoint at the end as went in."""
    script = str(EXAMPLES / "checkpoint.py")
    first = thalweg("run", "--workers", "2", script, cwd=tmp_path)
    (newest,) = [path.name for path in (tmp_path / "checkpoint").glob("step-*")][-1:]
    again = thalweg("run", "--workers", "2", script, cwd=tmp_path)
    assert accuracies(first.stdout) == accuracies(again.stdout) != []
    assert newest in {path.name for path in (tmp_path / "checkpoint").iterdir()}

"""A whole job is killed at any moment, and goes on with another number of workers."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.training.test_checkpoint import latest
from tests.training.under_fire import BATCH, SAMPLES, noted, train
from tests.training.workers import SECONDS, on_ranks, one_value
from thalweg.training.checkpoint import read

ROOT = Path(__file__).parents[2]


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_all(job: subprocess.Popen[str]) -> None:
    """The supervisor, its guard, the store and all workers at once."""
    root = psutil.Process(job.pid)
    family = [root, *root.children(recursive=True)]
    for one in family:
        one.send_signal(signal.SIGSTOP)  # so that none outlives another
    for one in family:
        one.kill()
    job.communicate(timeout=SECONDS)


def killed_while_it_saves(command: Sequence[str], folder: Path, rng: random.Random) -> int:
    """The step of the newest checkpoint that it left, which is a newer one."""
    before = latest(folder)
    job = start(*command)
    while latest(folder) == before:
        assert job.poll() is None, job.communicate()
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.5))
    assert job.poll() is None, "it was over too soon"
    kill_all(job)
    left = latest(folder)
    assert left is not None
    return read(left).step


def ended(command: Sequence[str]) -> str:
    job = start(*command)
    out, err = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, err
    return out


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sync", ["ring", "codedreduce(fanout=3, stragglers=1)"])
def test_an_exact_plan_ends_where_it_would_have(sync: str, tmp_path: Path) -> None:
    """Bit for bit, on four workers, then three, then five."""
    epochs = 40  # more than a job gets through until it is killed
    calm, folder = tmp_path / "calm", tmp_path / "folder"
    calm.mkdir()
    wanted = one_value(on_ranks(2, lambda _: train("ring", calm, epochs=epochs)), "values")
    rng = random.Random(sync)
    begun = 0
    parts = []  # steps that count, and where their samples are noted
    for size in (4, 3, 5):
        notes = tmp_path / f"notes{size}"
        notes.mkdir()
        command = ["-m", "tests.training.under_fire", sync, str(size), str(folder), str(notes)]
        if size < 5:
            reached = killed_while_it_saves([*command, str(epochs)], folder, rng)
        else:
            results = json.loads(ended([*command, str(epochs)]))
            reached = epochs * SAMPLES // BATCH
            assert one_value(results, "first") == begun
            assert one_value(results, "values") == wanted
        assert begun < reached
        parts.append((notes, begun, reached))
        begun = reached
    if sync == "ring":
        used = [
            (note.epoch, sample)
            for notes, first, beyond in parts
            for note in noted(notes)
            if note.taken and first <= note.step < beyond
            for sample in note.samples
        ]
        assert sorted(used) == [(e, s) for e in range(epochs) for s in range(SAMPLES)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sizes", [(4, 3), (3, 5)])
@pytest.mark.parametrize(
    "sync",
    ["ring", "ring+powersgd(rank=2)", "dssync", "codedreduce(fanout=3, stragglers=1)"],
)
def test_training_goes_on(sync: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    """Steps and place go on from the newest complete checkpoint, and the loss goes on falling."""
    folder, steps = tmp_path / "folder", 40
    saving = ["--steps", str(steps), "--checkpoint", str(folder), "--save-every", "1"]
    command = ["-m", "thalweg", "train", "digits", "--sync", sync, *saving]
    rng = random.Random(f"{sync} {sizes}")
    reached = killed_while_it_saves([*command, "--workers", str(sizes[0])], folder, rng)
    there = latest(folder)
    assert there is not None
    saved = read(there)
    output = json.loads(ended([*command, "--workers", str(sizes[1]), "--json", "-"]))
    rows: list[dict[str, Any]] = output["rows"]
    assert [row["step"] for row in rows] == list(range(reached + 1, steps + 1))
    a_epoch = -(-saved.sampling["samples"] // saved.sampling["batch size"])
    assert reached == saved.position.epoch * a_epoch + saved.position.batch
    last = sum(row["loss"] for row in rows[-5:]) / 5
    assert last < rows[0]["loss"]
    assert last < 2.0, "chance is 2.3"

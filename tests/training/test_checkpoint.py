from __future__ import annotations

import errno
import json
import multiprocessing.pool
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.training.test_state_encoding import assert_same
from thalweg.compress import Combine, Kept
from thalweg.errors import CheckpointError, RunError
from thalweg.members.world import World
from thalweg.training import checkpoint as module
from thalweg.training.checkpoint import (
    ABANDONED_WRITER_SECONDS,
    checkpoints_in,
    read,
    write,
)
from thalweg.training.checkpoint_io import load, newest
from thalweg.training.data.position import BatchIndex
from thalweg.training.snapshot import RankState, Snapshot

FILES = ["model", "optimizer", "state", "ranks"]


def example(step: int = 20, *, mark: float = 0.0, size: int = 10) -> Snapshot:
    return Snapshot(
        step=step,
        plan="ring+powersgd(rank=4)",
        position=BatchIndex(epoch=3, batch=17),
        sampling={"seed": 5},
        model={"weight": torch.full((size,), mark + step), "bias": torch.tensor(0.5)},
        optimizer={"state": {0: {"exp_avg": torch.full((size,), -1.0)}}, "param_groups": []},
        objects=[{"last_epoch": 3}, {"milestones": {1: 2}}],
        ranks=[
            RankState(
                random={"torch": torch.arange(5, dtype=torch.uint8)},
                kept={
                    "residual": Kept(
                        combine=Combine.SUM, arrays={"weight": np.ones(3)}, residual=True
                    ),
                    "third-party": Kept(combine=Combine.OWN, arrays={"weight": np.ones(3)}),
                },
            ),
            None,
        ],
    )


def save(directory: Path, step: int, *, keep: int = 2, **options: Any) -> Path:
    return write(directory, example(step, **options), version="1.2.3", keep=keep)


def latest(directory: Path) -> Path | None:
    found = newest(directory)
    return found and found[0]


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def assert_holds(path: Path | None, step: int, mark: float = 0.0) -> None:
    assert path is not None
    found, expected = read(path), example(step, mark=mark, size=0)
    assert found.step == step
    assert found.model["weight"].unique().tolist() == [step + mark]
    assert_same(found.packed()["ranks"], expected.packed()["ranks"])


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    written = example()
    path = write(tmp_path / "new" / "folder", written, version="1.2.3")
    assert path == tmp_path / "new" / "folder" / "step-00000020"
    assert names(path) == ["checkpoint.json", *sorted(f"{name}.safetensors" for name in FILES)]
    found = read(path)
    assert_same(found.packed(), written.packed())


def test_the_index_tells_people_what_is_inside(tmp_path: Path) -> None:
    content = json.loads((save(tmp_path, 20) / "checkpoint.json").read_text())["content"]
    assert content["thalweg"] == "1.2.3"
    assert content["model"]["weight"] == {"dtype": "float32", "shape": [10]}
    assert content["model"]["bias"] == {"dtype": "float32", "shape": []}


def test_whoever_may_read_the_folder_may_read_the_files(tmp_path: Path) -> None:
    path = save(tmp_path, 20)
    for file in path.iterdir():
        assert file.stat().st_mode & 0o777 == path.stat().st_mode & 0o666


def test_a_run_may_change_what_it_read(tmp_path: Path) -> None:
    """Neither does that reach the file, nor does removing the file reach the run."""
    path = save(tmp_path, 20)
    found = read(path)
    found.model["weight"].zero_()
    assert_holds(path, 20)
    shutil.rmtree(path)
    assert found.optimizer["state"][0]["exp_avg"].sum() == -10


def test_the_newest_are_kept(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None
    for step in (8, 16, 24, 123456789):
        path = save(tmp_path, step)
        assert latest(tmp_path) == path
    assert names(tmp_path) == ["step-00000024", "step-123456789"]
    write(tmp_path, example(123456790), version="1", keep=1)
    assert names(tmp_path) == ["step-123456790"]


def test_the_one_just_written_is_kept_even_if_others_are_further(tmp_path: Path) -> None:
    """A run that was started again from an earlier step."""
    for step in (30, 40, 20):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-00000020", "step-00000040"]


def test_a_step_written_twice_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 20)
    save(tmp_path, 20, mark=0.5)
    assert names(tmp_path) == ["step-00000020"]
    assert_holds(latest(tmp_path), 20, mark=0.5)


class Outdated(Exception):
    pass


@pytest.mark.parametrize(("asked", "left"), [(1, [8, 16]), (2, [8, 16, 24])])
def test_one_that_is_not_the_writer_any_more_changes_nothing_from_then_on(
    asked: int, left: list[int], tmp_path: Path
) -> None:
    """It is asked before the checkpoint gets its name, and before old ones go."""
    for step in (8, 16):
        save(tmp_path, step)
    answers = iter(range(1, 3))

    def fence() -> None:
        if next(answers) == asked:
            raise Outdated

    with pytest.raises(Outdated):
        write(tmp_path, example(24), version="1", fence=fence)
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]


@pytest.mark.parametrize("keep", [1, 2])
def test_what_came_while_it_was_written_is_neither_replaced_nor_removed(
    keep: int, tmp_path: Path
) -> None:
    """Another process has taken this one for dead, and writes."""

    def others_write(*steps: int) -> Callable[[], None]:
        left = list(steps)

        def write_meanwhile() -> None:
            while left:
                save(tmp_path / "others", left[0], keep=keep, mark=0.5)
                (tmp_path / "others" / f"step-{left[0]:08d}").rename(
                    tmp_path / f"step-{left.pop(0):08d}"
                )

        return write_meanwhile

    save(tmp_path, 10, keep=keep)
    write(tmp_path, example(20), version="1", keep=keep, fence=others_write(30, 40))
    there = [path.name for path in checkpoints_in(tmp_path)]
    assert there[:3] == ["step-00000040", "step-00000030", "step-00000020"]
    with pytest.raises(CheckpointError, match="another process has written it meanwhile"):
        write(tmp_path, example(50), version="1", keep=keep, fence=others_write(50))
    assert_holds(latest(tmp_path), 50, mark=0.5)


def test_what_others_put_there_stays(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "mine.txt").touch()
    (tmp_path / "notes.txt").touch()
    for step in (2, 3, 4):
        save(tmp_path, step)
    assert names(tmp_path) == ["notes.txt", "step-00000001", "step-00000003", "step-00000004"]


def test_what_cannot_be_kept_is_named_before_anything_is_written(tmp_path: Path) -> None:
    strange = replace(example(), objects=[{}, {"lr_lambdas": [abs]}])
    with pytest.raises(CheckpointError, match=r"^state\[1\]\['lr_lambdas'\]\[0\] is a builtin_"):
        write(tmp_path / "x", strange, version="1")
    with pytest.raises(CheckpointError, match="keep=0 keeps no checkpoint; keep 1 or more"):
        write(tmp_path / "x", example(), version="1", keep=0)
    assert names(tmp_path) == []


# Damage


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("good"), 20)


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_noticed(data: st.DataObject, good: Path, tmp_path: Path) -> None:
    """In the index it may hit a blank: then what is read is still what was written."""
    file = data.draw(st.sampled_from(sorted(good.iterdir())))
    content = bytearray(file.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    copy = tmp_path / "step-00000020"
    shutil.copytree(good, copy, dirs_exist_ok=True)
    (copy / file.name).write_bytes(content)
    if file.suffix == ".json" and same_json(bytes(content), file.read_bytes()):
        assert_holds(copy, 20)
    else:
        with pytest.raises(CheckpointError, match=rf"^[^\n]*{re.escape(str(copy))}[^\n]*$"):
            read(copy)


def same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_shorter_file_is_noticed_at_a_glance(
    data: st.DataObject, good: Path, tmp_path: Path
) -> None:
    file = data.draw(st.sampled_from(sorted(good.iterdir())))
    content = file.read_bytes()
    length = data.draw(st.integers(0, len(content) - 1))
    copy = tmp_path / "step-00000020"
    shutil.copytree(good, copy, dirs_exist_ok=True)
    (copy / file.name).write_bytes(content[:length])
    for look in (lambda: read(copy), lambda: latest(tmp_path)):
        with pytest.raises(CheckpointError, match=r"step-00000020 is damaged: .*; resume from an"):
            look()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is damaged: checkpoint.json isn't JSON"),
        ("[" * 100_000, "is damaged"),
        ("[]", "is no checkpoint of Thalweg"),
        ('{"format": 1, "step": 20}', "is no checkpoint of Thalweg"),
        ('{"kind": "thalweg checkpoint"}', "is damaged"),
        ('{"kind": "thalweg checkpoint", "format": "one"}', "is damaged"),
        ('{"kind": "thalweg checkpoint", "format": 1, "sha256": "", "content": 3}', "is damaged"),
    ],
)
def test_foreign_files_are_refused_by_name(tmp_path: Path, text: str, what: str) -> None:
    save(tmp_path, 8)
    path = save(tmp_path, 16)
    (path / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"step-00000016 {what}") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert latest(tmp_path) == tmp_path / "step-00000008"


def test_an_index_with_a_good_seal_but_other_content(tmp_path: Path) -> None:
    path = save(tmp_path, 16)
    index = json.loads((path / "checkpoint.json").read_text())
    index["content"]["trees"]["state"] = {"unheard of": 1}
    index["sha256"] = module._seal(1, index["content"])
    (path / "checkpoint.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"is damaged: checkpoint.json lacks what"):
        read(path)


def test_a_newer_format_is_not_passed_over(tmp_path: Path) -> None:
    """Going on from an older one would lose steps without a word."""
    save(tmp_path, 8)
    path = save(tmp_path, 16)
    index = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(index | {"format": 7}))
    for look in (lambda: read(path), lambda: latest(tmp_path)):
        with pytest.raises(CheckpointError, match=r"16 has format 7, and .* reads 1; read it with"):
            look()


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is damaged: it has no checkpoint.json"):
        read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file: Not a directory; "):
        read(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"file: Not a directory; name the directory"):
        latest(tmp_path / "file")


# Trouble while writing


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"can't write .*; name a directory, not a file"):
            save(directory, 20)


def test_no_permission(tmp_path: Path) -> None:
    """Root may write everywhere, so another user tries."""
    save(tmp_path, 8)
    tmp_path.chmod(0o555)
    try:
        with as_nobody(), pytest.raises(CheckpointError, match=r"denied; name a directory that"):
            save(tmp_path, 16)
    finally:
        tmp_path.chmod(0o755)
    assert names(tmp_path) == ["step-00000008"]
    assert_holds(latest(tmp_path), 8)


@contextmanager
def as_nobody() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def files_no_longer_than(nbytes: int) -> Iterator[None]:
    """Writing beyond fails with EFBIG, as a full disk does with ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    sizes = [file.stat().st_size for file in save(tmp_path, 8, size=300).iterdir()]
    for nbytes in (0, 1, *(size - 1 for size in sizes)):
        with (
            files_no_longer_than(nbytes),
            pytest.raises(CheckpointError, match=r"16: File too large; make room .* as they were$"),
        ):
            save(tmp_path, 16, size=300)
        assert names(tmp_path) == ["step-00000008"]
        assert_holds(latest(tmp_path), 8)
    with files_no_longer_than(max(sizes) + 9):
        save(tmp_path, 16, size=300)
    assert_holds(latest(tmp_path), 16)


def test_what_a_killed_writer_should_have_removed_makes_room(tmp_path: Path) -> None:
    """Else a disk with room for three is full for ever, once three are there of which two are
    kept. What is kept must be sound."""
    for step in (1, 2, 3, 4):
        newest = save(tmp_path, step, keep=4)
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    with files_no_longer_than(1), pytest.raises(CheckpointError):
        save(tmp_path, 5, keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_leftovers_go_once_their_writer_is_gone(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        gone = pool.apply(os.getpid)
    host = gethostname()
    stay = [
        f".step-00000001@{host}@{os.getppid()}",
        ".step-00000001@other-host@1",
        ".step-00000001@other-host@2",
    ]
    leave = [
        f".step-00000001@{host}@{gone}",
        f".step-00000002.new@{host}@{os.getpid()}",
        ".step-00000001@other-host@3",
    ]
    for name in [*stay, *leave]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    long_ago = time.time() - ABANDONED_WRITER_SECONDS - 1
    os.utime(tmp_path / stay[2], (long_ago, long_ago))  # but its file is still written
    for path in (tmp_path / leave[2] / "model.safetensors", tmp_path / leave[2]):
        os.utime(path, (long_ago, long_ago))
    save(tmp_path, 20)
    assert names(tmp_path) == sorted([*stay, "step-00000020"])


def test_a_replacement_that_was_cut_off_is_finished_unless_it_is_damaged(tmp_path: Path) -> None:
    old, new = tmp_path / "step-00000020", tmp_path / "step-00000020.new"
    save(tmp_path, 20, mark=0.5).rename(new)
    save(tmp_path / "other", 20).rename(old)
    assert_holds(latest(tmp_path), 20, mark=0.5)
    shutil.copytree(new, tmp_path / "copy")
    save(tmp_path, 24)
    assert_holds(old, 20, mark=0.5)
    assert not new.exists()

    (tmp_path / "copy").rename(new)
    (new / "model.safetensors").unlink()
    save(tmp_path, 24)
    assert_holds(old, 20, mark=0.5)
    save(tmp_path, 20, mark=0.25)
    assert_holds(old, 20, mark=0.25)
    assert not new.exists()


# Every moment of a write. Python announces each file operation to its audit hooks; a hook can't be
# taken off again, so a process of its own counts the operations and has trouble at the n-th.

Trouble = Callable[[], None]


class Faults:
    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble
        self.left = -1
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.left >= 0 and (event == "open" or event.startswith(("os.", "shutil."))):
            self.left -= 1
            if self.left < 0:
                self.trouble()

    def come(self, folder: Path, step: int, moment: int) -> bool:
        """Write, with trouble at this moment; False if it was over before."""
        child = os.fork()
        if child == 0:
            code = 3
            try:
                self.left = moment
                with suppress(CheckpointError):
                    save(folder, step, mark=0.5)
                code = 1 if self.left < 0 else 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 1, -signal.SIGKILL)
        return code != 0


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def at_every_moment(directory: Path, trouble: Trouble, before: list[int], step: int) -> int:
    """The number of moments at which trouble came; whenever that is, there is a good one to read,
    and the next write puts everything in order."""
    quick()
    faults = Faults(trouble)
    for moment in range(1000):
        folder = directory / str(moment)
        for earlier in before:
            save(folder, earlier)
        came = faults.come(folder, step, moment)
        assert_nothing_is_lost(folder, before, step)
        save(folder, 99)
        assert not [name for name in names(folder) if not re.fullmatch(r"step-\d{8}", name)]
        assert_holds(latest(folder), 99)
        if not came:
            return moment
    raise AssertionError("a write never ends")


def quick() -> None:
    """Without waiting for the disk: a killed process loses nothing that the system holds. It is a
    moment of a write all the same."""
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: sys.audit("os.fsync", descriptor)


def assert_nothing_is_lost(folder: Path, before: list[int], step: int) -> None:
    """All that can be seen is good; the new one, or else all old ones, are there."""
    seen = checkpoints_in(folder) if folder.exists() else []
    found = {path.name: read(path) for path in seen}
    marks = {name: float(c.model["weight"][0]) - c.step for name, c in found.items()}
    assert all(mark in (0.0, 0.5) for mark in marks.values())
    if 0.5 not in marks.values():
        assert sorted(checkpoint.step for checkpoint in found.values()) == before
    if found:
        assert latest(folder) == seen[0]


SCENARIOS = [([], 8), ([8], 16), ([8, 16], 24), ([8], 8), ([8, 16], 8)]


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[multiprocessing.pool.Pool]:
    """A process with one thread, which can fork and take audit hooks."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


@pytest.mark.parametrize("trouble", [killed, disk_full])
def test_trouble_at_every_moment_of_a_write(
    tmp_path: Path, trouble: Trouble, elsewhere: multiprocessing.pool.Pool
) -> None:
    jobs = [(tmp_path / str(n), trouble, *case) for n, case in enumerate(SCENARIOS)]
    moments = elsewhere.starmap(at_every_moment, jobs)
    assert min(moments) > 20, moments


def kill_writers(directory: Path, rounds: int) -> int:
    """Writers that write without end, killed somewhere in their second, third or fourth write,
    also within safetensors; the number of those that left an unfinished one behind."""
    quick()
    rng = random.Random(7)
    step = unfinished = 0
    for _ in range(rounds):
        reader, writer = os.pipe()
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            while True:
                step += 1
                save(directory, step, size=100_000)
                os.write(writer, b".")
        os.read(reader, 1)
        time.sleep(rng.uniform(0, 3) * (time.monotonic() - started))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        unfinished += any(name.startswith(".") for name in names(directory))
        there = newest(directory)
        assert there is not None
        found = there[1]
        assert found.model["weight"].unique().tolist() == [found.step]
        assert found.step > step
        step = found.step
    return unfinished


def test_a_killed_writer_leaves_a_checkpoint(
    tmp_path: Path, elsewhere: multiprocessing.pool.Pool
) -> None:
    assert elsewhere.apply(kill_writers, (tmp_path, 30)) > 0


def test_a_timeout_of_load_names_the_rank_that_reads(tmp_path: Path) -> None:
    world = World.of(dist.HashStore(), 1, 2, timeout=0.1)
    session: Any = SimpleNamespace(
        rank=1,
        world=world,
        abort_flag=world.abort_flag(),
        snapshot=example,
        checkpoint_writer=lambda: 0,
    )
    with pytest.raises(RunError, match="'resume' in the store; look at the output of rank 0"):
        load(session, tmp_path)

"""Which checkpoint a run goes on from, if some are damaged or somebody else's."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.training.test_checkpoint import FILES, assert_holds, latest, names, save
from thalweg.errors import CheckpointError

ALL = ["checkpoint.json", *(f"{part}.safetensors" for part in FILES)]


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    file.write_bytes(content)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def swap(file: Path) -> None:
    """With the one of the checkpoint before."""
    other = file.parent.parent / "step-00000008" / file.name
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a bit at the front": lambda file: flip(file, 70),
    "a bit at the end": lambda file: flip(file, 8 * file.stat().st_size - 25),
    "cut": cut,
    "empty": lambda file: os.truncate(file, 0),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_ones_are_passed_over_and_named(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    older = save(tmp_path, 8)
    for path in [save(tmp_path, step, keep=3) for step in (16, 24)]:
        DAMAGE[damage](path / name)
    assert_holds(latest(tmp_path), 8)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2
    for line, step in zip(said, (24, 16), strict=True):
        assert line.startswith(f"checkpoint {tmp_path}/step-000000{step} is damaged: ")
        assert line.endswith(f"; the run resumes from {older}")
        assert "\n" not in line
    shutil.rmtree(older)
    with pytest.raises(CheckpointError, match=r"step-00000024 is damaged: .*; resume from an"):
        latest(tmp_path)
    save(tmp_path, 24)
    assert_holds(latest(tmp_path), 24)


def test_files_of_another_checkpoint(tmp_path: Path) -> None:
    """Of all that differ between two; then neither is sound any more."""
    for name in ("checkpoint.json", "model.safetensors"):
        folder = tmp_path / name
        for step in (4, 8, 16):
            save(folder, step, keep=3)
        swap(folder / "step-00000016" / name)
        assert_holds(latest(folder), 4)


def test_what_was_passed_over_neither_counts_nor_goes(tmp_path: Path) -> None:
    """Or the sound ones would make room for it."""
    save(tmp_path, 8)
    flip(save(tmp_path, 16) / "model.safetensors", -25)
    for step in (9, 10):
        save(tmp_path, step)
        before = f"step-{8 if step == 9 else 9:08d}"
        assert names(tmp_path) == [before, f"step-{step:08d}", "step-00000016"]
    assert_holds(latest(tmp_path), 10)
    save(tmp_path, 16)
    assert names(tmp_path) == ["step-00000010", "step-00000016"]
    assert_holds(latest(tmp_path), 16)


def test_a_damaged_replacement_replaces_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, 20)
    new = path.with_name("step-00000020.new")
    shutil.copytree(path, new)
    flip(new / "ranks.safetensors", -25)
    save(tmp_path, 24)
    assert_holds(path, 20)


# Of others


def hugging_face(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    save_file({"weight": torch.ones(3)}, folder / "model.safetensors")


def trainer(folder: Path) -> None:
    (folder / "checkpoint-500").mkdir()
    torch.save({"weight": torch.ones(3)}, folder / "checkpoint-500" / "optimizer.pt")


def one_of_ours(folder: Path) -> None:
    for file in save(folder.parent / "whole", 20).iterdir():
        shutil.copy(file, folder)


@pytest.mark.parametrize(
    ("fill", "name"),
    [
        (hugging_face, "model.safetensors"),
        (trainer, "checkpoint-500/optimizer.pt"),
        (one_of_ours, "model.safetensors"),
    ],
)
def test_a_folder_of_others_is_refused(
    fill: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    """Neither is it read, nor does the run begin anew without a word."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    fill(folder)
    with pytest.raises(CheckpointError) as caught:
        latest(folder)
    assert str(caught.value) == (
        f"{folder} holds {name}, and no checkpoint of a run; name the folder that was given to "
        "run.save, or a new one to start from the beginning"
    )


def test_a_file_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt: Not a directory; name the directory"):
        latest(tmp_path / "model.pt")


def test_a_folder_without_models_is_as_good_as_empty(tmp_path: Path) -> None:
    """Notes beside it, and what a writer left that was killed in its first write."""
    assert latest(tmp_path) is None
    (tmp_path / "notes.txt").touch()
    hidden = tmp_path / ".step-00000001@host@123"
    hidden.mkdir()
    (hidden / "model.safetensors").touch()
    assert latest(tmp_path) is None

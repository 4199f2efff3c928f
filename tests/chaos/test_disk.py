from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from thalweg.chaos.disk import Disk
from thalweg.errors import CheckpointError, UsageError
from thalweg.training.checkpoint import read, write
from thalweg.training.data.position import BatchIndex
from thalweg.training.snapshot import Snapshot


@pytest.fixture
def disk() -> Iterator[Disk]:
    try:
        made = Disk()
    except UsageError as error:
        pytest.skip(str(error))
    with closing(made):
        yield made


def save(directory: Path, step: int) -> Path:
    snapshot = Snapshot(
        step=step, plan="ring", position=BatchIndex(), model={}, optimizer={}, objects=[]
    )
    return write(directory, snapshot, version="0")


def test_it_is_full_until_there_is_room(disk: Disk) -> None:
    first = save(disk.checkpoints, 1)
    disk.fill()
    with pytest.raises(CheckpointError, match="No space left"):
        save(disk.checkpoints, 2)
    assert read(first).step == 1
    disk.free()
    assert read(save(disk.checkpoints, 2)).step == 2


def test_flipped_bytes_are_refused_by_name(disk: Disk) -> None:
    assert disk.flip() is None
    save(disk.checkpoints, 1)
    for _ in range(2):
        said = disk.flip()
        assert said is not None
        assert "step-00000001 is damaged" in said


def test_it_has_no_place_in_the_tree_of_files(disk: Disk) -> None:
    save(disk.checkpoints, 1)
    assert "thalweg-disk" not in Path("/proc/self/mounts").read_text()
    assert os.listdir(disk.checkpoints) == ["step-00000001"]  # noqa: PTH208

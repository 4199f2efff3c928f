from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.observe.steps import step_of
from thalweg.errors import UsageError
from thalweg.facts import Size
from thalweg.observe.journal import Journal, read_records
from thalweg.observe.records import ClockSample, RunHeader, StepRecord

OPENING = RunHeader(
    rank=3, size=4, host="a", rack="r", members=(0, 1, 2, 3), sync="ring", at=0.0, thalweg="1"
)
SMALL = Size(8_000)


def steps(folder: Path, rank: int = 3) -> list[int]:
    return [r.step for r in read_records(folder)[rank] if isinstance(r, StepRecord)]


def test_what_was_added_is_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new", 3)
    journal.add([OPENING, step_of(0, computing=0.1)])
    journal.add([step_of(1, computing=0.1)])
    journal.close()
    assert read_records(tmp_path / "new")[3][0] == OPENING
    assert steps(tmp_path / "new") == [0, 1]


def test_it_is_on_the_disk_before_it_is_closed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 3)
    journal.add([step_of(0, computing=0.1)])
    assert steps(tmp_path) == [0]
    journal.close()


def test_it_does_not_grow_without_bound_and_keeps_the_newest(tmp_path: Path) -> None:
    clock = ClockSample(at=0.0, offset=1.0, error=0.0)
    journal = Journal(tmp_path, 3, largest=SMALL)
    journal.add([OPENING, clock])
    for number in range(1000):
        journal.add([step_of(number, computing=0.1)])
    journal.close()
    files = list(tmp_path.iterdir())
    assert sum(path.stat().st_size for path in files) <= SMALL.nbytes
    kept = steps(tmp_path)
    assert kept == list(range(kept[0], 1000))
    assert len(kept) > 15
    records = read_records(tmp_path)[3]
    assert records[:2] == [OPENING, clock]  # whose it is, in every file


def test_a_new_run_begins_anew_and_one_started_again_goes_on(tmp_path: Path) -> None:
    for again, expected in ((False, [1]), (True, [1, 2]), (False, [3])):
        journal = Journal(tmp_path, 3, again=again)
        journal.add([step_of(expected[-1], computing=0.1)])
        journal.close()
        assert steps(tmp_path) == expected


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 3)
    journal.add([step_of(0, computing=0.1)])
    journal.close()
    with journal.path.open("a") as file:
        file.write('{"kind":"step","step":1,"beg')
    assert steps(tmp_path) == [0]


def test_a_full_disk_ends_the_recording_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path, 3)
    assert journal._file is not None
    os.dup2(os.open("/dev/full", os.O_WRONLY), journal._file.fileno())
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            journal.add([step_of(number, computing=0.1)])
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    journal.close()


def test_a_folder_that_cannot_be_made_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "folder", 3)
    journal.add([OPENING])
    assert len(caplog.records) == 1


@pytest.mark.parametrize("folder", ["absent", "."])
def test_a_folder_without_records_says_what_to_do(tmp_path: Path, folder: str) -> None:
    with pytest.raises(UsageError, match=r"no records .*; name the folder"):
        read_records(tmp_path / folder)

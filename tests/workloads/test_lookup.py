"""Jobs by name and from files; mistakes are reported in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from thalweg.errors import WorkloadError
from thalweg.workloads import find_job, parse_job, read_job

OWN = """
from __future__ import annotations
from dataclasses import dataclass, replace
from thalweg.workloads import Job, parse_job

@dataclass
class Settings:
    batch: int = 16

def job() -> Job:
    return replace(parse_job("synthetic(params=1k)"), name="mine", batch=Settings().batch)
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "can't read the job ''; write it like digits or synthetic(params=2.5M), or name a"),
        ("synthetic(params=1k", "can't read the job 'synthetic(params=1k'; write it like digits"),
        ("digits+fp16", "'digits+fp16' has options of a plan, and a job takes none; write"),
        (
            "digits @ bucket=4MB",
            "'digits @ bucket=4MB' has options of a plan, and a job takes none;",
        ),
        (
            "digit",
            "there is no job 'digit'; there are digits, logistic, synthetic and tinygpt, or name a "
            "Python file (did you mean digits?)",
        ),
        ("digits(size=3)", "digits has no argument 'size'; it takes none"),
        (
            "synthetic(param=3)",
            "synthetic has no argument 'param'; it takes params and layers (did you mean params?)",
        ),
        ("synthetic(params=3x)", "params of synthetic: '3x' is not a count; write it like 2.5M"),
        ("logistic(classes=1)", "classes of logistic: 1 is too small; give at least 2"),
    ],
)
def test_texts_that_name_no_job(text: str, message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        find_job(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert "plan " not in caught.value.problem


def test_the_name_is_what_was_written_but_for_white_space() -> None:
    assert parse_job("synthetic( params = 1k,layers=2 )").name == "synthetic(params=1k, layers=2)"
    assert find_job(" synthetic(params=1k) ").name == "synthetic(params=1k)"


def test_a_file_with_a_job_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    job = find_job(str(file))
    assert (job.name, job.batch) == ("mine", 16)


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_a_job.py").write_text(OWN)
    file = tmp_path / "mine.py"
    file.write_text(
        "def job():\n    import neighbour_of_a_job\n    return neighbour_of_a_job.job()\n"
    )
    paths = list(sys.path)
    assert read_job(file).name == "mine"
    assert sys.path == paths


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "mine.py has no function job; define job(), which returns a"),
        ("job = 3", "mine.py has no function job; define job(), which returns a"),
        (
            "def job():\n    return 3",
            "mine.py returned int, not Job; return a thalweg.workloads.Job",
        ),
        ("def job(:", "mine.py raised SyntaxError: invalid syntax (mine.py, line 1); correct the"),
        (
            "\nimport nothing_like_it",
            "mine.py, line 2, raised ModuleNotFoundError: No module named",
        ),
        ("def job():\n    raise ValueError('a\\nb')", "mine.py, line 2, raised ValueError: a b;"),
        (
            "def job():\n    raise ValueError",
            "mine.py, line 2, raised ValueError; correct the file",
        ),
        ("raise SystemExit(3)", "mine.py, line 1, raised SystemExit: 3; correct the file"),
        ("def job(x):\n    return x", "mine.py raised TypeError: job() missing 1 required"),
    ],
)
def test_files_without_a_job(tmp_path: Path, source: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(WorkloadError) as caught:
        read_job(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_thalweg_says_in_a_file_is_said_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN.replace("= 16", "= 0"))
    with pytest.raises(WorkloadError, match=r"^the batch of mine is 0; give at least 1$"):
        read_job(file)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"there is no file .*; give a Python file that"):
        find_job(str(tmp_path / "mine.py"))

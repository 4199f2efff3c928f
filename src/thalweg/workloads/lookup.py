"""Lookup of jobs by name (`digits`, `synthetic(params=2.5M)`) or in the user's Python file.

A file of this package that declares a `JOB` is found by its name. The user's file defines a
function `job()` that returns a `Job`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import thalweg.workloads
from thalweg.declarations import fill_defaults, listed, nearest
from thalweg.discovery import declared
from thalweg.errors import PlanError, ThalwegError, WorkloadError
from thalweg.plan import PlanText
from thalweg.workloads.job import Job, JobKind

JOB_EXAMPLE = "write it like digits or synthetic(params=2.5M), or name a Python file"
_T = TypeVar("_T")


def find_job(text: str) -> Job:
    """The job of this name, or of this Python file."""
    written = text.strip()
    return read_job(Path(written)) if written.endswith(".py") else parse_job(written)


def all_jobs() -> dict[str, JobKind]:
    """The jobs that come with Thalweg, by name."""
    return declared(thalweg.workloads, "JOB")


def parse_job(text: str) -> Job:
    """The job that this text names; WorkloadError if there is none."""
    try:
        written = PlanText.parse(text)
    except PlanError:  # its message is about plans
        raise WorkloadError(f"can't read the job {text!r}", JOB_EXAMPLE) from None
    if written.compressor is not None or written.settings:
        raise WorkloadError(
            f"{str(written)!r} has options of a plan, and a job takes none",
            f"write {written.preset}, and the options after a plan",
        )
    call, kinds = written.preset, all_jobs()
    if call.name not in kinds:
        raise WorkloadError(
            f"there is no job {call.name!r}",
            f"there are {listed(kinds)}, or name a Python file" + nearest(call.name, kinds),
        )
    kind = kinds[call.name]
    try:
        values = fill_defaults(kind.name, call.arguments, kind.parameters)
    except PlanError as error:
        raise WorkloadError(error.problem, error.remedy) from None
    return kind.make(str(call), **values)


def read_job(path: Path) -> Job:
    """The job that `job()` of this Python file returns; WorkloadError if it returns none."""
    if not path.is_file():
        raise WorkloadError(f"there is no file {path}", "give a Python file that defines job()")
    with _importable_folder(path):
        module = _called(path, lambda: _imported(path))
        make = getattr(module, "job", None)
        if not callable(make):
            raise WorkloadError(
                f"{path} has no function job", "define job(), which returns a thalweg.workloads.Job"
            )
        job: object = _called(path, make)
    if not isinstance(job, Job):
        raise WorkloadError(
            f"job() in {path} returned {type(job).__name__}, not Job",
            "return a thalweg.workloads.Job",
        )
    return job


@contextmanager
def _importable_folder(path: Path) -> Iterator[None]:
    """Make modules next to the file importable, as when Python runs it."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _imported(path: Path) -> ModuleType:
    module = ModuleType(f"thalweg_job_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), module.__dict__)
    return module


def _called(path: Path, call: Callable[[], _T]) -> _T:
    """Call the user's code; WorkloadError with the file, the line and the error if it raises."""
    try:
        return call()
    except ThalwegError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
        place = f"{path}, line {lines[-1]}," if lines else f"{path}"
        kind, message = type(error).__name__, " ".join(str(error).split())
        reason = f"{kind}: {message}" if message else kind
        raise WorkloadError(f"{place} raised {reason}", "correct the file") from error

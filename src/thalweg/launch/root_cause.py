"""Which of several failures is the cause: the first in time that isn't due to another."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.errors import (
    Interrupted,
    PeerFailed,
    PeerLate,
    PeerLost,
    StoreLost,
    ThalwegError,
    TransportClosed,
    UsageError,
    WorkerFailed,
)
from thalweg.launch.worker_process import Failure

CONSEQUENTIAL_ERRORS = {
    *(
        kind.__name__
        for kind in (Interrupted, PeerFailed, PeerLate, PeerLost, StoreLost, TransportClosed)
    ),
    *("DistBackendError", "DistNetworkError", "DistStoreError"),
}
"""Errors that a worker gets because of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How a worker ended: `code` as Python's subprocess has it, below 0 for a signal."""

    rank: int
    code: int
    failure: Failure | None
    result: dict[str, Any] | None

    def is_consequence(self) -> bool:
        if self.failure is None:
            return False
        return self.failure.kind in CONSEQUENTIAL_ERRORS or "gloo/transport" in self.failure.problem

    def is_mistake(self) -> bool:
        """Of usage."""
        return self.failure is not None and self.failure.exit_code == UsageError.exit_code

    def as_error(self, who: str) -> WorkerFailed:
        if self.failure is not None:
            return WorkerFailed(f"{who}: {self.failure.problem}", self.failure.remedy)
        if self.code == -signal.SIGKILL:
            return WorkerFailed(
                f"{who} was killed by SIGKILL (out of memory?)",
                "if nobody killed it (`thalweg lab kill`, `lab down`), see the kernel's log, and "
                "give the workers less to hold or the machine more",
            )
        if self.code < 0:
            return WorkerFailed(
                f"{who} was killed by {_signal_name(-self.code)}", "its last lines may say why"
            )
        if self.code == 0:
            return WorkerFailed(f"{who} ended without a result", "return from the work, don't exit")
        return WorkerFailed(f"{who} ended with exit code {self.code}", "its last lines may say why")


def root_cause(
    size: int,
    failures: Sequence[WorkerExit],
    killed: Sequence[int],
    called: Callable[[int], str],
    spare: Collection[int] = (),
) -> ThalwegError:
    """The first failure that isn't due to another, of one that isn't spare if there is such; one
    mistake of usage that all made is that. `killed` are those that a director killed."""
    said = {exit_.failure for exit_ in failures}
    if len(failures) == size and len(said) == 1:
        failure = said.pop()
        if failure is not None and failure.exit_code == UsageError.exit_code:
            return UsageError(failure.problem, failure.remedy)
        if failure is not None and size > 1:
            return WorkerFailed(f"every rank: {failure.problem}", failure.remedy)
    causes = [exit_ for exit_ in failures if not exit_.is_consequence()]
    causes.sort(key=lambda exit_: exit_.rank in spare)
    first = (causes or failures)[0]
    told = first.as_error(called(first.rank))
    if killed and not causes:
        return WorkerFailed(
            f"{called(killed[0])} was killed on purpose, and others can't go on without it: "
            f"{told.problem}",
            "use a plan that survives this, or leave the event out",
        )
    return told


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class StderrFailure:
    """Why a program failed, read off its standard error line by line, since it can't tell the
    supervisor otherwise: the one line that Thalweg ends a worker with, or the last line of a
    traceback. `failure` is the last one that it told, and `line` the line of Thalweg's that told
    it."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.line = ""
        self._in_traceback = False

    def read_line(self, line: str) -> bool:
        """Whether this is the line that Thalweg ends a worker with."""
        line = re.sub(r"^\[rank\d+\]: ", "", line)  # torch's, once there is a process group
        if line.startswith("thalweg: "):
            problem, _, remedy = line.removeprefix("thalweg: ").rpartition("; ")
            problem = re.sub(r"^rank \d+: ", "", problem)  # who it was is told anyway
            kind = PeerFailed.__name__ if re.match(r"rank \d+ aborted: ", problem) else ""
            self.failure = Failure(kind=kind, problem=problem, remedy=remedy, exit_code=1)
            self.line = line
            return True
        if line.startswith("Traceback (most recent call last)"):
            self._in_traceback = True
        elif self._in_traceback and line and not line.startswith(" "):
            self._in_traceback = False
            self.failure = _uncaught(line)
        return False


def _uncaught(line: str) -> Failure:
    name, colon, text = line.partition(":")
    kind = name.rpartition(".")[2]
    return Failure(
        kind=kind, problem=f"{kind}{colon}{text}", remedy="its traceback is above", exit_code=1
    )

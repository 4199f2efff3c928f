"""The root cause of several failures: the first in time that isn't a consequence of another. And
the failure of a program that only printed it: `StderrFailure` finds the failure in its output."""

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
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
}
"""Errors of a worker that are consequences of another rank's failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """The end of a worker: its exit `code`, negative for a signal, its failure and its result."""

    rank: int
    code: int
    failure: Failure | None
    result: dict[str, Any] | None

    def is_consequence(self) -> bool:
        """True if another rank's failure caused this one."""
        if self.failure is None:
            return False
        return self.failure.kind in CONSEQUENTIAL_ERRORS or "gloo/transport" in self.failure.problem

    def is_usage_error(self) -> bool:
        return self.failure is not None and self.failure.exit_code == UsageError.exit_code

    def as_error(self, who: str) -> WorkerFailed:
        if self.failure is not None:
            return WorkerFailed(f"{who}: {self.failure.problem}", self.failure.remedy)
        if self.code == -signal.SIGKILL:
            return WorkerFailed(
                f"{who} was killed by SIGKILL (out of memory?)",
                "unless somebody killed it (`thalweg lab kill`, `lab down`), see the kernel's log, "
                "and reduce the workers' memory or add some",
            )
        if self.code == 0:
            return WorkerFailed(f"{who} ended without a result", "return from the work, don't exit")
        signaled = f"was killed by {signal_name(-self.code)}"
        how = signaled if self.code < 0 else f"ended with exit code {self.code}"
        return WorkerFailed(f"{who} {how}", "its last lines may say why")


def root_cause(
    size: int,
    failures: Sequence[WorkerExit],
    killed: Sequence[int],
    label: Callable[[int], str],
    spare: Collection[int] = (),
) -> ThalwegError:
    """Return the error to raise for these failures, of which there is one at least; `label` names
    a rank, and `killed` are the ranks that a hook killed.

    1. If all ranks failed with the same failure, it is returned once.
    2. If a rank was killed, and all failures are consequences, the kill is the root cause.
    3. Otherwise it is the first failure that isn't a consequence, preferably of a rank that isn't
       `spare`; the first of all if all are consequences.
    """
    failure, *others = {exit_.failure for exit_ in failures}
    if failure is not None and not others and len(failures) == size:
        if failure.exit_code == UsageError.exit_code:
            return UsageError(failure.problem, failure.remedy)
        if size > 1:
            return WorkerFailed(f"every rank: {failure.problem}", failure.remedy)
    causes = [exit_ for exit_ in failures if not exit_.is_consequence()]
    causes.sort(key=lambda exit_: exit_.rank in spare)
    first = (causes or failures)[0]
    error = first.as_error(label(first.rank))
    if killed and not causes:
        return WorkerFailed(
            f"{label(killed[0])} was killed on purpose, and the others can't continue without it: "
            f"{error.problem}",
            "use a plan that tolerates this, or remove the event",
        )
    return error


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class StderrFailure:
    """The last failure in the standard error of a program, which has no other channel to the
    supervisor. `read_line` is called with each line, and finds two kinds of failure: the line with
    which Thalweg ends a worker, which is kept in `line`, and the last line of a traceback."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.line = ""
        self._in_traceback = False

    def read_line(self, line: str) -> bool:
        """Parse a line; True for the line with which Thalweg ends a worker."""
        line = re.sub(r"^\[rank\d+\]: ", "", line)  # torch's prefix, with a process group
        if line.startswith("thalweg: "):
            problem, _, remedy = line.removeprefix("thalweg: ").rpartition("; ")
            problem = re.sub(r"^rank \d+: ", "", problem)  # errors of workers begin with the rank
            kind = PeerFailed.__name__ if re.match(r"rank \d+ aborted: ", problem) else ""
            self.failure = Failure(kind=kind, problem=problem, remedy=remedy, exit_code=1)
            self.line = line
            return True
        if line.startswith("Traceback (most recent call last)"):
            self._in_traceback = True
        elif self._in_traceback and line and not line.startswith(" "):
            self._in_traceback = False
            name, colon, text = line.partition(":")
            kind, remedy = name.rpartition(".")[2], "its traceback is above"
            self.failure = Failure(
                kind=kind, problem=f"{kind}{colon}{text}", remedy=remedy, exit_code=1
            )
        return False

"""The end of this rank's part of a run, and its report to the other ranks.

At the end of the script each rank waits a moment for the others, which may still have to read its
last messages. A rank that fails reports the cause; a rank that ends while the others continue,
because its loader had fewer batches, is reported too, as they would wait until their timeout.

An error of the script reaches the other ranks when it leaves the block of a `with attach(...)`, or
else at the end of the interpreter, which keeps the uncaught error in `sys.last_value`. Only workers
of `thalweg run` install a hook for uncaught errors: elsewhere that hook is the launcher's, the
trainer's or the notebook's.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from types import TracebackType
from typing import ClassVar, TextIO

from thalweg.errors import DEBUG_VARIABLE, PeerLost, ThalwegError
from thalweg.launch.launcher_variables import LAUNCHER_VARIABLE
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World

LEAVE_TIMEOUT_SECONDS = 30.0  # for the other ranks to end
FAILED_LEAVE_TIMEOUT_SECONDS = 3.0  # the same after an error
# Other ranks end this much later than the root cause, so that launchers name the right one.
ROOT_CAUSE_LEAD_SECONDS = 0.5


class Shutdown:
    """The end of one run on this rank. It reports uncaught errors to the other ranks."""

    def __init__(self, world: World, abort_flag: AbortFlag) -> None:
        self.rank = world.rank
        self.abort_flag = abort_flag
        self.is_spare = False  # the others can do without this rank
        self.failed = False
        self._left = False
        self._uncaught_before = _uncaught()  # in a notebook, by a cell before
        _OneLine.watched[:] = [*(e for e in _OneLine.watched if not e.failed), self]

    def fail(self, problem: str) -> None:
        self.failed = True
        if not self.is_spare:
            self.abort_flag.publish(problem)

    @contextmanager
    def publishing_errors(self) -> Iterator[None]:
        """Inside, errors reach the other ranks at once."""
        try:
            yield
        except Exception as error:
            self.report(error)
            raise
        finally:
            errors_in_one_line()

    def report(self, error: BaseException) -> None:
        """Report an error of this rank to the others."""
        known = _on_purpose(error)
        self.fail(known.problem if known else f"{type(error).__name__}: {error}")

    def report_uncaught(self) -> None:
        """Report the error that has ended the script, if any, at the end of the interpreter."""
        error = _uncaught()
        if error is not None and error is not self._uncaught_before and not self.failed:
            self.report(error)

    def leave(self, step: int, part: Callable[[float], bool]) -> None:
        """Leave the run: `part` waits for the others, at most the given seconds, and returns False
        if they take longer."""
        if self._left:
            return
        self._left = True
        _OneLine.watched[:] = [e for e in _OneLine.watched if e is not self]
        if not part(FAILED_LEAVE_TIMEOUT_SECONDS if self.failed else LEAVE_TIMEOUT_SECONDS):
            self.fail(f"its part of the run ended after step {step}")
        elif self.failed and self.abort_flag.poll() is not None:
            sleep(ROOT_CAUSE_LEAD_SECONDS)


class _OneLine:
    """A hook for uncaught errors. Errors that Thalweg raises on purpose are printed in one line,
    others with their traceback; both are reported to the other ranks."""

    watched: ClassVar[list[Shutdown]] = []

    def __init__(self) -> None:
        self._before = sys.excepthook

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        known = _on_purpose(error)
        prefix = ""
        for shutdown in self.watched:
            shutdown.report(error)
            prefix = f"rank {shutdown.rank}: "
        if known and DEBUG_VARIABLE not in os.environ:
            print(f"thalweg: {prefix}{known}", file=sys.stderr)
        else:
            self._before(kind, error, traceback)


class _LogLines(logging.StreamHandler[TextIO]):
    """Thalweg's log lines on standard error, for scripts that don't set up logging; once they do,
    their own handlers serve. Tables are omitted: `run.report()` has them."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers and "\n" not in record.getMessage():
            super().emit(record)


def show_log_lines() -> None:
    """Show log lines, unless the script or its launcher has set up logging."""
    log = logging.getLogger("thalweg")
    if log.level == logging.NOTSET and not log.handlers and not logging.root.handlers:
        handler = _LogLines()
        handler.setFormatter(logging.Formatter("[thalweg] %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


def errors_in_one_line() -> None:
    """Install the hook for uncaught errors in a worker of `thalweg run`. Torch installs its own
    when it joins a process group."""
    if LAUNCHER_VARIABLE in os.environ and not isinstance(sys.excepthook, _OneLine):
        sys.excepthook = _OneLine()
        os.register_at_fork(after_in_child=_OneLine.watched.clear)  # a forked process is no rank


def _uncaught() -> BaseException | None:
    """The last error that no code of this process has caught."""
    return getattr(sys, "last_value", None)


def _on_purpose(error: BaseException) -> ThalwegError | None:
    """The error to print in one line, also for Gloo's report of a lost peer; None for other
    errors."""
    if isinstance(error, ThalwegError):
        return error
    if not isinstance(error, RuntimeError) or "gloo/transport" not in str(error):
        return None
    reason = " ".join(str(error).partition("] ")[2].partition(". ")[0].split())
    return PeerLost(
        f"torch's process group lost a peer ({reason})", "look at the rank that ended first"
    )

"""How this rank's part of a run ends, and what the other ranks learn of it.

At the end of the script everybody waits a moment for the others: what one has sent last, another
may still have to read. Who fails tells the others why; who simply ends while the others go on,
because its loader had fewer batches, is reported too, or they would wait until their timeout.
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
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World

LEAVE_TIMEOUT_SECONDS = 30.0  # seconds at most to wait for the others at the end
FAILED_LEAVE_TIMEOUT_SECONDS = 3.0  # the same, once they have been told to stop
# Seconds that others end after the culprit, whom launchers then name as the cause.
ROOT_CAUSE_LEAD_SECONDS = 0.5


class Shutdown:
    """One run's, on this rank. Uncaught errors are told to the others from now on."""

    def __init__(self, world: World, abort_flag: AbortFlag) -> None:
        self.rank = world.rank
        self.abort_flag = abort_flag
        self.is_spare = False  # the others can do without this rank
        self._failed = False
        self._left = False
        _OneLine.watched[:] = [*(e for e in _OneLine.watched if not e.failed), self]

    def fail(self, problem: str) -> None:
        self._failed = True
        if not self.is_spare:
            self.abort_flag.raise_flag(problem)

    @contextmanager
    def publishing_errors(self) -> Iterator[None]:
        """What is raised here for a user to read reaches the others at once."""
        try:
            yield
        except ThalwegError as error:
            self.fail(error.problem)
            raise
        finally:
            errors_in_one_line()

    @property
    def failed(self) -> bool:
        return self._failed

    def leave(self, step: int, part: Callable[[float], bool]) -> None:
        """`part` waits for the others, so many seconds, and says whether that was enough."""
        if self._left:
            return
        self._left = True
        _OneLine.watched[:] = [e for e in _OneLine.watched if e is not self]
        patience = FAILED_LEAVE_TIMEOUT_SECONDS if self._failed else LEAVE_TIMEOUT_SECONDS
        if not part(patience):
            self.fail(f"its part of the run ended after step {step}")
        elif self._failed and self.abort_flag.poll() is not None:
            sleep(ROOT_CAUSE_LEAD_SECONDS)


class _OneLine:
    """Of uncaught errors: what Thalweg raises on purpose says all there is to say in one line;
    others keep their traceback. The other ranks are told of both."""

    watched: ClassVar[list[Shutdown]] = []

    def __init__(self) -> None:
        self._before = sys.excepthook

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        meant = _on_purpose(error)
        problem = meant.problem if meant else f"{kind.__name__}: {error}"
        who = ""
        for shutdown in self.watched:
            shutdown.fail(problem)
            who = f"rank {shutdown.rank}: "
        if meant and DEBUG_VARIABLE not in os.environ:
            print(f"thalweg: {who}{meant}", file=sys.stderr)
        else:
            self._before(kind, error, traceback)


class _LogLines(logging.StreamHandler[TextIO]):
    """Thalweg's log lines on standard error, for scripts that don't set up logging: when they do,
    their own handlers serve. Tables stay out: `run.summary()` has them."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers and "\n" not in record.getMessage():
            super().emit(record)


def show_log_lines() -> None:
    """From now on, unless the script or its launcher has set up logging."""
    log = logging.getLogger("thalweg")
    if log.level == logging.NOTSET and not log.handlers and not logging.root.handlers:
        handler = _LogLines()
        handler.setFormatter(logging.Formatter("[thalweg] %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


def errors_in_one_line() -> None:
    """From now on. Torch puts a hook of its own before ours when it joins a process group."""
    if not isinstance(sys.excepthook, _OneLine):
        sys.excepthook = _OneLine()
        os.register_at_fork(after_in_child=_OneLine.watched.clear)  # a fork is no rank


def _on_purpose(error: BaseException) -> ThalwegError | None:
    """Also what Gloo says, under torch's own path, of a peer that is gone."""
    if isinstance(error, ThalwegError):
        return error
    if not isinstance(error, RuntimeError) or "gloo/transport" not in str(error):
        return None
    reason = " ".join(str(error).partition("] ")[2].partition(". ")[0].split())
    return PeerLost(
        f"torch's own path lost a peer ({reason})", "look at which rank ended first, and why"
    )

"""Why a program failed, read off its standard error: it can't tell the supervisor otherwise.

Either the one line that Thalweg ends a worker with, or the last line of a traceback.
"""

from __future__ import annotations

import re

from thalweg.runtime.forked import Failure


class LastWords:
    """Hears a program's standard error line by line; `failure` is what it last told of one."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self._in_traceback = False

    def hear(self, line: str) -> None:
        line = re.sub(r"^\[rank\d+\]: ", "", line)  # torch's, once there is a process group
        if line.startswith("thalweg: "):
            problem, _, remedy = line.removeprefix("thalweg: ").rpartition("; ")
            problem = re.sub(r"^rank \d+: ", "", problem)  # who it was is told anyway
            self.failure = Failure(kind="", problem=problem, remedy=remedy, exit_code=1)
        elif line.startswith("Traceback (most recent call last)"):
            self._in_traceback = True
        elif self._in_traceback and line and not line.startswith(" "):
            self._in_traceback = False
            self.failure = _uncaught(line)


def _uncaught(line: str) -> Failure:
    name, colon, text = line.partition(":")
    kind = name.rpartition(".")[2]
    return Failure(
        kind=kind, problem=f"{kind}{colon}{text}", remedy="its traceback is above", exit_code=1
    )

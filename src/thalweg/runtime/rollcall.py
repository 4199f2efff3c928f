"""Who doesn't answer?

In a ring all wait for a neighbour when one rank stops, and each would blame its own. So the first
whose patience ends calls the ranks through the store; those who are waiting answer, since they look
around meanwhile. Who hasn't answered is dead, cut off, or busy with something else: the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic, sleep

from thalweg.transports.line import Line

LONGEST_ABSENCE = 1.5  # seconds: who waits looks around more often than that
PAUSE = 0.05
_CALLED = "rollcall"


class RollCall:
    def __init__(self, line: Line, ranks: Sequence[int]) -> None:
        self._line = line
        self._ranks = ranks
        self._answered = False

    def answer(self) -> None:
        """If the roll is being called: here."""
        if not self._answered and self._line.ask(lambda store: store.check([_CALLED])):
            self._say_here()

    def absent(self) -> list[int]:
        """Call the roll; who doesn't answer."""
        self._line.ask(lambda store: store.add(_CALLED, 1))
        self._say_here()
        deadline = monotonic() + LONGEST_ABSENCE
        while (missing := self._missing()) and monotonic() < deadline:
            sleep(PAUSE)
        return missing

    def _say_here(self) -> None:
        self._answered = True
        self._line.ask(lambda store: store.add(f"{_CALLED}/{self._line.rank}", 1))

    def _missing(self) -> list[int]:
        keys = {rank: f"{_CALLED}/{rank}" for rank in self._ranks}
        return self._line.ask(lambda s: [r for r, key in keys.items() if not s.check([key])])

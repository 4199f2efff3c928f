"""Who doesn't answer? Before the alarm is sounded for lateness, the roll is called.

In a ring all wait for a neighbour when one rank stops, and each would blame its own. So the first
whose patience ends calls the ranks through the store; those who are waiting answer, since they look
around meanwhile. Who hasn't answered is dead, cut off, or busy with something else: the cause.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic, sleep

from thalweg.errors import PeerFailed, RunError, ranks_text
from thalweg.runtime import Alarm, World
from thalweg.runtime.execute import LOOK_AROUND

PATIENCE = 3 * LOOK_AROUND  # seconds
PAUSE = LOOK_AROUND / 10
LATE = "and nothing came"  # how a PeerLate ends
CALL = "rollcall"


class RollCall(Alarm):
    """An alarm that says whose fault lateness is."""

    def __init__(self, world: World) -> None:
        super().__init__(world.store, world.rank)
        self._own = f"{CALL}/{world.rank}"
        self._keys = {rank: f"{CALL}/{rank}" for rank in range(world.size)}
        self._answered = False
        self._found: PeerFailed | None = None

    def sound(self, problem: str) -> None:
        if problem.endswith(LATE) and self.heard() is None:
            absent: list[int] = []
            with suppress(RunError):  # the store is gone
                absent = self._call()
            if absent:
                problem = f"{ranks_text(absent)} {_do_not(absent)} answer: {problem}"
                self._found = PeerFailed(problem, f"look at {ranks_text(absent)} and its output")
        super().sound(problem)

    def heard(self) -> PeerFailed | None:
        heard = super().heard()
        if heard is None and not self._answered:
            with suppress(RunError):
                if self._line.ask(lambda store: store.check([CALL])):
                    self._answer()
        return heard or self._found

    def _call(self) -> list[int]:
        """The ranks that don't answer; nobody, if another rank has found that out meanwhile."""
        self._line.ask(lambda store: store.add(CALL, 1))
        self._answer()
        deadline = monotonic() + PATIENCE
        while (absent := self._absent()) and monotonic() < deadline:
            if super().heard() is not None:
                return []
            sleep(PAUSE)
        return absent

    def _answer(self) -> None:
        self._answered = True
        self._line.ask(lambda store: store.add(self._own, 1))

    def _absent(self) -> list[int]:
        keys = self._keys.items()
        return self._line.ask(lambda s: [rank for rank, key in keys if not s.check([key])])


def _do_not(ranks: list[int]) -> str:
    return "doesn't" if len(ranks) == 1 else "don't"

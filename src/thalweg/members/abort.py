"""A rank that gives up says so, and the others stop waiting for it.

The alarm is one key of the store that all ranks can reach; the first to set it is the cause, what
fails after it is a consequence and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic, sleep

from thalweg.errors import PeerFailed, PeerLate, RunError, StoreLost, ranks_text
from thalweg.members.activity import key_of, last_seen
from thalweg.transports.store_client import Line, Store

LONGEST_ABSENCE = 1.5  # seconds: who waits looks around more often than that
PAUSE = 0.05
_CALLED = "rollcall"
_KEY = "alarm"


class RollCall:
    """Who doesn't answer?

    In a ring all wait for a neighbour when one rank stops, and each would blame its own. So the
    first whose patience ends calls the ranks through the store; those who are waiting answer, since
    they look around meanwhile. Who hasn't answered is dead, cut off, or busy with something else:
    the cause.
    """

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


class Alarm:
    """The alarm of all `ranks`, seen from one of them."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int] = ()) -> None:
        self._line = Line(store, rank)
        self._roll = RollCall(self._line, ranks or (rank,))
        self._found: PeerFailed | None = None  # by this rank's own roll call

    def sound(self, problem: str) -> None:
        """Tell the others why this rank gives up. Never raises: the store may be gone as well."""
        text = json.dumps({"rank": self._line.rank, "problem": " ".join(problem.split())})
        with suppress(RunError):
            self._line.ask(lambda store: store.compare_set(_KEY, "", text))

    def sound_lateness(self, late: PeerLate) -> None:
        """The same, because another rank didn't come: find out whose fault that is."""
        problem = late.problem
        with suppress(RunError):
            if self.heard() is None and (absent := self._roll.absent()):
                don_t = "doesn't" if len(absent) == 1 else "don't"
                seen = "".join(map(self._last_seen, absent))
                problem = f"{ranks_text(absent)} {don_t} answer{seen}: {problem}"
                self._found = PeerFailed(problem, f"look at {ranks_text(absent)} and its output")
        self.sound(problem)

    def _last_seen(self, rank: int) -> str:
        seen = self._line.ask(lambda store: last_seen(store, key_of(rank)))
        return f", rank {rank} was last seen {seen}" if seen else ""

    def witness(self, what: str) -> int:
        """How many ranks have seen this, with this one."""
        with suppress(RunError):
            return self._line.ask(lambda store: store.add(f"seen/{what}", 1))
        return 0

    def heard(self) -> PeerFailed | None:
        """What another rank sounded, or that the store is gone; None while all is quiet."""
        try:
            self._roll.answer()
            text = self._line.ask(lambda s: s.get(_KEY) if s.check([_KEY]) else None)
        except RunError as error:
            return StoreLost(f"the store is gone ({error.problem})", error.remedy)
        if text is None:
            return self._found
        alarm = json.loads(text)
        if alarm["rank"] == self._line.rank:
            return self._found
        return PeerFailed(
            f"rank {alarm['rank']} gave up: {alarm['problem']}",
            f"look at the output of rank {alarm['rank']}",
        )
